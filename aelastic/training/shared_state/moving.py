"""Moves the state from one rank to another.

The tree is sent first, then the bytes of all tensors, one after the other, in pieces.  Besides the state itself, either
rank needs memory for one piece, and for one tensor at a time that is not contiguous.  So a state larger than half of
the memory can be moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aelastic.training.shared_state.state import ReceivedState, State
from aelastic.training.shared_state.wire import Wire

PIECE = 4 << 20  # bytes; larger ones are not faster (gloo, loopback)
_HEAD = 64 << 10  # bytes that are sent before it is known how long the tree is: most trees are shorter
_LENGTH = 8


def send(state: State, target: int, wire: Wire) -> None:
    """Sends the state to a rank, which calls `receive`."""
    tree = state.packed()
    head = len(tree).to_bytes(_LENGTH, "little") + tree[: _HEAD - _LENGTH]
    wire.send_bytes(head.ljust(_HEAD, b"\0"), target)
    for start in range(_HEAD - _LENGTH, len(tree), PIECE):
        wire.send_bytes(tree[start : start + PIECE], target)
    current = _Bytes(-1, torch.empty(0))
    with torch.no_grad():
        for piece, buffer in _buffered(state.tensors, wire.device):
            for part in piece:
                if current.tensor != part.tensor:
                    current = _Bytes(part.tensor, state.tensors[part.tensor])
                part.of(buffer).copy_(current.bytes[part.start : part.start + part.length])
            wire.send(buffer, target)


def receive(objects: Sequence[Any], source: int, wire: Wire) -> None:
    """Loads into the objects the state that the rank `source` sends."""
    head = wire.receive_bytes(_HEAD, source)
    length = int.from_bytes(head[:_LENGTH], "little")
    tree = head[_LENGTH : _LENGTH + length]
    while len(tree) < length:
        tree += wire.receive_bytes(min(PIECE, length - len(tree)), source)
    received = ReceivedState(tree, objects)
    current = _Bytes(-1, torch.empty(0))
    with torch.no_grad():
        for piece, buffer in _buffered(received.tensors, wire.device):
            wire.receive(buffer, source)
            for part in piece:
                if current.tensor != part.tensor:
                    current.put_back()
                    current = _Bytes(part.tensor, received.tensors[part.tensor])
                current.bytes[part.start : part.start + part.length].copy_(part.of(buffer))
        current.put_back()
    received.load()


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
    """Yields the pieces of these tensors, each with the memory for it, which the next one reuses."""
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
