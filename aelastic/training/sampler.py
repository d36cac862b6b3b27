"""A sampler that continues in the middle of an epoch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, DistributedSampler


class ResumableSampler(DistributedSampler[Any]):
    """Splits the data over the ranks as `DistributedSampler` does, but can leave out what was seen.

        sampler = ResumableSampler(data, seed=1)
        loader = DataLoader(data, batch_size=32, sampler=sampler)
        start = round.share(model, optimizer)
        epoch, seen = divmod(start, len(loader))
        sampler.set_epoch(epoch)
        sampler.skip(seen * 32)

    Without `num_replicas` and `rank`, it takes them from the environment of the worker, so that it can be made before
    the process group.  Make it in the decorated function: a job that shrinks or grows renumbers its ranks.
    """

    def __init__(
        self, dataset: Dataset[Any], num_replicas: int | None = None, rank: int | None = None, **options: Any
    ) -> None:
        """Takes the arguments of `DistributedSampler`."""
        if num_replicas is None:
            num_replicas = int(os.environ.get("WORLD_SIZE", "1"))
        if rank is None:
            rank = int(os.environ.get("RANK", "0"))
        super().__init__(dataset, num_replicas, rank, **options)
        self._skipped = 0

    def skip(self, samples: int) -> None:
        """Leaves out this rank's first samples, in the next pass over the data only."""
        self._skipped = samples

    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        skipped, self._skipped = self._skipped, 0
        return iter(indices[skipped:])
