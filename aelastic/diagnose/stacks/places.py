"""Folds a stack into a place: the part that can be compared with the stacks of other ranks.

The user's code is what is neither Python's library, nor an installed package, nor ours.  A rank waits in a collective
if a frame of its main thread is in a module of collectives: gloo's, NCCL's and MPI's are called there.  A backward pass
runs in C++, and the collectives of its gradients with it, or in threads of its own: if the main thread waits there, it
waits in what these do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aelastic.diagnose.failures.places import Place
from aelastic.diagnose.stacks.format import Frame, Thread

_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3(\.\d+)?/|/aelastic/|^<|/torch/")
_COLLECTIVES = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives|rendezvous|nn/functional)\.py$"
    r"|/horovod/.*mpi_ops\.py$"
    r"|/aelastic/training/notice/page\.py$"  # a rank that has saved for a drain waits for the others
)
# Of modules that also run what computes: functions that end in a collective in C++, as DDP's broadcast of buffers does.
_IN_C = re.compile(
    r"/torch/(nn/parallel/distributed|distributed/utils)\.py:"
    r"(_distributed_broadcast_coalesced|_sync_module_states|_verify_param_shape_across_processes|_sync_params_and_buffers)$"
)
_BACKWARD = "_engine_run_backward"
# A thread that waits, according to the kernel (`Place.state`).
_WAITS = {"S", "lock"}
# Frames of that module that are not the name of a collective.
_WRAPPERS = {"wrapper", "_wait_impl", "<lambda>"}


def place_of(place: Place, threads: Sequence[Thread]) -> Place:
    """Returns a rank's place, from the frames of its threads, the main one first; frames come innermost first."""
    frames = threads[0].frames if threads else ()
    if not frames:
        return place.replace(unknown="no Python frame")
    own = next((frame for frame in frames if is_users(frame.file)), None)
    at = "" if own is None else _at(own)
    collective = _collective_in(frames)
    if not collective and frames[0].function == _BACKWARD and place.state in _WAITS:
        collective = next(filter(None, (_collective_in(thread.frames) for thread in threads[1:])), "backward")
    return place.replace(at=at, call=f"{frames[0].function} ({at or _at(frames[0])})", collective=collective)


def _collective_in(frames: Sequence[Frame]) -> str:
    """Returns the outermost collective of a stack, or ""."""
    inside = [frame for frame in frames if _is_collective(frame)]
    return inside[-1].function if inside else ""


def _is_collective(frame: Frame) -> bool:
    if _IN_C.search(f"{frame.file}:{frame.function}"):
        return True
    return bool(_COLLECTIVES.search(frame.file)) and frame.function not in _WRAPPERS


def is_users(file: str) -> bool:
    """Whether a file is the user's own code."""
    return not _INSTALLED.search(file)


def _at(frame: Frame) -> str:
    return f"{frame.file.rpartition('/')[2]}:{frame.line}" if frame.line else frame.file.rpartition("/")[2]
