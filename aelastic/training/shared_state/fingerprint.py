"""A checksum over parameters and optimizers, which are equal in all ranks of a replica group.

Buffers are left out: those of batch normalization differ from rank to rank, and DDP sends rank 0's to all.  So are the
objects of a `Late`: a replacement has its state before it has the object.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from aelastic.training.kept import modules_of
from aelastic.training.shared_state.state import State, local

_PIECE = 16 << 20  # bytes, copied from a device at a time


def size(objects: Sequence[Any]) -> int:
    """Returns about how many bytes are compared: parameters, and two numbers for each of them in an optimizer."""
    parameters = [each for module in modules_of(objects) for each in module.parameters()]
    return 3 * sum(local(each).nbytes for each in parameters)


def fingerprint(objects: Sequence[Any]) -> int:
    total = 0
    for each in objects:
        if isinstance(each, torch.nn.Module):
            tensors = [local(parameter) for parameter in each.parameters()]
        elif isinstance(each, torch.optim.Optimizer):
            tensors = State([each]).tensors
            total = zlib.crc32(repr(each.state_dict()["param_groups"]).encode(), total)
        else:
            continue
        for tensor in tensors:
            total = _with_tensor(tensor.detach(), total)
    return total


def _with_tensor(tensor: torch.Tensor, total: int) -> int:
    flat = tensor.contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    data = flat.view(torch.uint8)
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE].cpu()
        memory = (ctypes.c_char * len(piece)).from_address(piece.data_ptr())
        total = zlib.crc32(memory, total)
    return total
