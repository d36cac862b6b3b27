"""Watches one worker of a rehearsal: the steps that it commits, with some of its parameters, and its habits.

What it can see: updates by optimizers of torch; collectives that Python calls, but not those of DDP's reducer; models
that are wrapped in `DistributedDataParallel`, but not by other means.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from aelastic.training.kept import modules_of
from aelastic.training.rehearsed import notes, reads
from aelastic.training.shared_state.state import local

_TENSORS, _ELEMENTS = 64, 8  # how many parameters are noted, and how many elements of each
# Updates by one optimizer without a commit, and commits with gradients that are not applied: fewer may be chance.
_UPDATES_MAX, _UNAPPLIED_MAX = 20, 8
_COLLECTIVES = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv",
    "recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter",
    "send",
)  # fmt: skip


_watch: Watch | None = None


def of_this_process(*, in_place: bool) -> Watch:
    """Returns the watch of this process.  Called when a decorated function is called.

    Args:
        in_place: whether the agent can recover this process in place.
    """
    global _watch  # noqa: PLW0603  it changes classes of torch, once
    if _watch is None:
        _watch = Watch(in_place=in_place)
    return _watch


class Watch:
    def __init__(self, *, in_place: bool) -> None:
        reads.stop()
        self._in_place = in_place
        self._round, self._rank = -1, -1
        self._objects: Sequence[Any] = ()
        self._newest = -1  # step that was committed
        self._is_updated = False  # since the last commit
        self._updates: dict[int, int] = {}  # since the last commit, by optimizer
        self._collectives: dict[str, str] = {}  # after an update since the last commit, by their places
        self._unapplied = 0  # commits of this round whose gradients are not applied
        self._wrapped: list[_Wrapped] = []
        self._old_groups: Sequence[weakref.ref[Any]] = ()
        self._reported: set[tuple[str, str]] = set()
        register_optimizer_step_post_hook(self._after_update)
        _wrap(DistributedDataParallel, "__init__", self._is_wrapping)
        for name in _COLLECTIVES:
            if hasattr(dist.ProcessGroup, name):
                _wrap(dist.ProcessGroup, name, functools.partial(self._is_calling, name))

    def begin(self, number: int, *, has_groups: bool, old_groups: Sequence[weakref.ref[Any]] = ()) -> None:
        """Called when the function is about to be called.

        Args:
            number: of the round.
            has_groups: whether there are process groups already.
            old_groups: those of the last round.
        """
        self._round, self._rank = number, int(os.environ.get("RANK", "0"))
        self._old_groups = old_groups
        self._is_updated, self._unapplied = False, 0
        self._updates.clear()
        self._collectives.clear()
        self._note(notes.BEGAN, in_place=self._in_place)
        if has_groups:
            self._note_habit(notes.GROUP_OUTSIDE, "")

    def before_share(self, objects: Sequence[Any]) -> None:
        if self._in_place and not dist.is_initialized():
            self._note_habit(notes.NO_GROUP, notes.place_in_script()[0])
        state = {id(parameter) for module in modules_of(objects) for parameter in module.parameters()}
        for each in self._wrapped:
            is_of_state = any(id(parameter()) in state for parameter in each.parameters)
            if each.round == self._round and is_of_state:
                self._note_habit(notes.WRAPPED_FIRST, each.where, each.kind)
            elif each.round < self._round and each.model() is not None:
                self._note_habit(notes.STILL_REFERENCED, each.where, each.kind)

    def shared(self, objects: Sequence[Any], step: int) -> None:
        self._objects, self._newest = objects, step
        self._note(notes.SHARED, step=step)

    def committed(self, step: int) -> None:
        if step <= self._newest:
            return  # `Round.steps` does it again
        self._newest = step
        has_updated, self._is_updated = self._is_updated, False
        self._updates.clear()
        for where, function in self._collectives.items():
            self._note_habit(notes.COLLECTIVE_AFTER_UPDATE, where, function)
        self._collectives.clear()
        if not has_updated and self._have_gradients():
            self._unapplied += 1
            if self._unapplied == _UNAPPLIED_MAX:
                self._note_habit(notes.COMMIT_WITHOUT_UPDATE, notes.place_in_script()[0])
        if notes.is_noted(step):
            self._check_old_groups()
            self._note(notes.STEP, step=step, parameters=self._parameters(), random=random_states())

    # Called by torch.

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        self._is_updated = True
        count = self._updates[id(optimizer)] = self._updates.get(id(optimizer), 0) + 1
        if count == _UPDATES_MAX:
            self._note_habit(notes.NO_COMMIT, notes.place_in_script()[0])

    def _is_wrapping(self, model: Any, *args: Any, **kwargs: Any) -> None:
        network = args[0] if args else kwargs.get("module")
        parameters = [weakref.ref(each) for each in network.parameters()] if network is not None else []
        where = notes.place_in_script()[0]
        self._wrapped = [each for each in self._wrapped if each.round == self._round or each.model() is not None]
        self._wrapped.append(_Wrapped(weakref.ref(model), type(model).__name__, self._round, where, parameters))

    def _is_calling(self, name: str, *_: Any, **__: Any) -> None:
        if self._is_updated:
            self._collectives[notes.place_in_script()[0]] = _function_of_torch() or name

    # Findings.

    def _have_gradients(self) -> bool:
        """Whether there are gradients that could be applied; those that overflowed are skipped by a `GradScaler`."""
        gradients = [
            each.grad for module in modules_of(self._objects) for each in module.parameters() if each.grad is not None
        ]
        return bool(gradients) and all(bool(torch.isfinite(local(each)).all()) for each in gradients)

    def _parameters(self) -> list[float]:
        if self._rank != 0:
            return []
        tensors = [local(each).detach() for module in modules_of(self._objects) for each in module.parameters()]
        found: list[float] = []
        for tensor in tensors[:: -(-len(tensors) // _TENSORS) or 1]:
            flat = tensor.reshape(-1)
            found += flat[:: -(-len(flat) // _ELEMENTS) or 1].double().tolist()
        return found

    def _check_old_groups(self) -> None:
        """Checks whether groups of the last round still exist; threads that drop them may take a few milliseconds."""
        if not self._old_groups or any(each.name == "aelastic-groups" for each in threading.enumerate()):
            return
        gc.collect()
        if any(each() is not None for each in self._old_groups):
            self._note_habit(notes.STILL_REFERENCED, "", "a process group")
        self._old_groups = ()

    def _note(self, kind: str, **fields: Any) -> None:
        notes.note(kind, round=self._round, rank=self._rank, **fields)

    def _note_habit(self, habit: str, where: str, what: str = "") -> None:
        if (habit, where) not in self._reported:
            self._reported.add((habit, where))
            self._note(notes.HABIT, habit=habit, where=where, what=what)


@dataclass
class _Wrapped:
    """A model that was wrapped.  It is referenced weakly: whether it outlives its round is the question."""

    model: weakref.ref[Any]
    kind: str
    round: int
    where: str
    parameters: Sequence[weakref.ref[Any]]


def random_states() -> dict[str, int]:
    """Returns checksums of the states of global random number generators, which need no object of the script."""
    found = {"torch": zlib.crc32(bytes(torch.get_rng_state().tolist()))}
    found["random"] = zlib.crc32(repr(random.getstate()).encode())
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = zlib.crc32(repr(numpy.random.get_state()[1:3]).encode())
    if torch.cuda.is_initialized():
        found["torch.cuda"] = zlib.crc32(bytes(torch.cuda.get_rng_state().tolist()))
    return found


def _function_of_torch() -> str:
    """Returns the function of `torch.distributed` that the script called; empty if it called a method of the group."""
    name = ""
    frame = sys._getframe(1)  # noqa: SLF001  as `inspect` does
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/distributed/" in path:
            name = name if frame.f_code.co_name == "wrapper" else frame.f_code.co_name
        elif name and "/torch/" not in path:
            break
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    return name


def _wrap(owner: type, name: str, before: Callable[..., None]) -> None:
    """Calls `before` before each call of a method, with the same arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(owner, name, call)
