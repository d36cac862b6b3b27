"""How the state gets from one rank to another.

First the tree goes, then the bytes of all tensors, one after the other, in pieces.  Beside the state itself, this takes
one piece at both ends and, one at a time, tensors that are not contiguous.  So a state larger than half of the memory
can be moved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from aelastic.training import torch_private
from aelastic.training.state import Received, State

PIECE = 16 << 20  # bytes; larger ones are not faster (gloo, loopback)
_HEAD = 64 << 10  # bytes that are sent before it is known how long the tree is: most trees are shorter
_LENGTH = 8


def send(state: State, target: int, group: Any) -> None:
    """Sends the state to a rank of the group, which calls `receive`."""
    device = torch_private.device_of(group)
    tree = state.packed()
    head = len(tree).to_bytes(_LENGTH, "little") + tree[: _HEAD - _LENGTH]
    _send_bytes(head.ljust(_HEAD, b"\0"), target, group, device)
    for start in range(_HEAD - _LENGTH, len(tree), PIECE):
        _send_bytes(tree[start : start + PIECE], target, group, device)
    current = _Bytes(-1, torch.empty(0))
    with torch.no_grad():
        for piece, buffer in _buffered(state.tensors, device):
            for part in piece:
                if current.tensor != part.tensor:
                    current = _Bytes(part.tensor, state.tensors[part.tensor])
                part.of(buffer).copy_(current.bytes[part.start : part.start + part.length])
            dist.send(buffer, target, group)


def receive(objects: Sequence[Any], source: int, group: Any) -> None:
    """Loads into the objects the state that the rank `source` sends."""
    device = torch_private.device_of(group)
    head = _receive_bytes(_HEAD, source, group, device)
    length = int.from_bytes(head[:_LENGTH], "little")
    tree = head[_LENGTH : _LENGTH + length]
    while len(tree) < length:
        tree += _receive_bytes(min(PIECE, length - len(tree)), source, group, device)
    received = Received(tree, objects)
    current = _Bytes(-1, torch.empty(0))
    with torch.no_grad():
        for piece, buffer in _buffered(received.tensors, device):
            dist.recv(buffer, source, group)
            for part in piece:
                if current.tensor != part.tensor:
                    current.put_back()
                    current = _Bytes(part.tensor, received.tensors[part.tensor])
                current.bytes[part.start : part.start + part.length].copy_(part.of(buffer))
        current.put_back()
    received.load()


def _send_bytes(data: bytes, target: int, group: Any, device: torch.device) -> None:
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), target, group)


def _receive_bytes(length: int, source: int, group: Any, device: torch.device) -> bytes:
    buffer = torch.empty(length, dtype=torch.uint8, device=device)
    dist.recv(buffer, source, group)
    received = buffer.cpu()
    return ctypes.string_at(received.data_ptr(), length)


@dataclass(frozen=True)
class Part:
    """Bytes of one tensor, and where they are in the piece."""

    tensor: int
    start: int
    length: int
    offset: int

    def of(self, piece: torch.Tensor) -> torch.Tensor:
        return piece[self.offset : self.offset + self.length]


def pieces(sizes: Sequence[int], limit: int = PIECE) -> Iterator[list[Part]]:
    """Cuts the bytes of all tensors into pieces of at most `limit` bytes."""
    piece: list[Part] = []
    offset = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            length = min(size - start, limit - offset)
            piece.append(Part(tensor, start, length, offset))
            start += length
            offset += length
            if offset == limit:
                yield piece
                piece, offset = [], 0
    if piece:
        yield piece


def _buffered(tensors: list[torch.Tensor], device: torch.device) -> Iterator[tuple[list[Part], torch.Tensor]]:
    """The pieces of these tensors, each with the memory for it, which the next one uses again."""
    sizes = [tensor.nbytes for tensor in tensors]
    buffer = torch.empty(min(PIECE, sum(sizes)), dtype=torch.uint8, device=device)
    for piece in pieces(sizes):
        yield piece, buffer[: piece[-1].offset + piece[-1].length]


class _Bytes:
    """A tensor as bytes: its own, or, if it is not contiguous, those of a copy."""

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.tensor = number
        self._original = tensor
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self._contiguous = tensor if is_plain else tensor.resolve_conj().resolve_neg().contiguous()
        flat = self._contiguous.view(-1)
        self.bytes = (
            torch.view_as_real(flat).view(-1).view(torch.uint8) if flat.is_complex() else flat.view(torch.uint8)
        )

    def put_back(self) -> None:
        """Called when the bytes have been changed."""
        if self._contiguous is not self._original:
            self._original.copy_(self._contiguous)
