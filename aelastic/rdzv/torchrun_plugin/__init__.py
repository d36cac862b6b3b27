"""torchrun's `--rdzv-backend etcd-v3`: torch finds it in the entry-point group `torchrun.handlers`.

torch loads this module whenever `torch.distributed.elastic.rendezvous` is imported, by its launcher as by every worker,
for each user who has aelastic installed.  So it imports nothing; the rest comes with the first handler.
"""

from __future__ import annotations

__all__ = ["etcd_v3"]

TYPE_CHECKING = False  # as type checkers take it: `typing` has not always been imported before us
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def etcd_v3() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What makes the handlers (torch: a `RendezvousHandlerCreator`)."""
    return _create_handler


def _create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from aelastic.rdzv.torchrun_plugin.handler import EtcdV3Handler

    return EtcdV3Handler(parameters)
