"""What `Round.share` sends between ranks: each wait for another rank ends when the round is over.

Cutting sockets does not free a rank from everything: gloo forgets to wake the sender or the receiver of a message that
was half sent (torch 2.13).  So these calls are made in a thread, which is then left behind, with the buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from aelastic.training import torch_private
from aelastic.training.link import Link


class Wire:
    """One process group.

    Args:
        group: torch's.
        link: knows when the round is over; None if nobody does.
        number: the round.

    Raises:
        RoundOver: by each method, if the round ends first.
    """

    def __init__(self, group: Any, link: Link | None, number: int) -> None:
        self.group = group
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.device = torch_private.device_of(group)
        self._link = link
        self._number = number

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of each rank of the group."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        all_of_them = [torch.empty_like(mine) for _ in self.ranks]
        self._wait(lambda: dist.all_gather(all_of_them, mine, self.group))
        return [each.tolist() for each in all_of_them]

    def send(self, buffer: torch.Tensor, target: int) -> None:
        self._wait(lambda: dist.send(buffer, target, self.group))

    def receive(self, buffer: torch.Tensor, source: int) -> None:
        self._wait(lambda: dist.recv(buffer, source, self.group))

    def send_bytes(self, data: bytes, target: int) -> None:
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device), target)

    def receive_bytes(self, length: int, source: int) -> bytes:
        buffer = torch.empty(length, dtype=torch.uint8, device=self.device)
        self.receive(buffer, source)
        received = buffer.cpu()
        return ctypes.string_at(received.data_ptr(), length)

    def _wait(self, call: Callable[[], Any]) -> None:
        if self._link is None:
            call()
        else:
            self._link.unless_over(self._number, call)
