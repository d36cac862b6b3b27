"""The rounds of a decorated function: it is called once in each, and waits at the safe point in between."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from aelastic.training import link as links
from aelastic.training import messages, torch_private
from aelastic.training.consequence import is_consequence
from aelastic.training.forming import Forming
from aelastic.training.kept import Kept
from aelastic.training.late import Late
from aelastic.training.link import Link
from aelastic.training.notice import page
from aelastic.training.rehearsed.notes import FOLDER_VARIABLE
from aelastic.training.shared_state import sharing
from aelastic.training.shared_state.state import is_sharded
from aelastic.training.shared_state.wire import Wire
from aelastic.training.sockets import GroupSockets
from aelastic.training.vote import Vote

if TYPE_CHECKING:
    from aelastic.training.rehearsed.watch import Watch

_ROUND_VARIABLE = "AELASTIC_ROUND"
_STOP_S = 60.0  # an agent ends workers whose state is lost within moments
_DROP_S = 1.0


class Round:
    """One call of the decorated function.  `number` is the value of `AELASTIC_ROUND`: it increases with each round."""

    def __init__(self) -> None:
        self.number = int(os.environ.get(_ROUND_VARIABLE, "0"))

    def share(self, *state: Any, load: sharing.Load | None = None, replicas: Any = None) -> int:
        """Brings every rank to the newest whole step, and returns that step.  A collective: every rank calls it.

        Call it before the model is wrapped in `DistributedDataParallel`, which copies rank 0's weights to all ranks.

        Args:
            state: objects with `state_dict` and `load_state_dict`: modules, optimizers, schedulers, `Late`, `Value`.
            load: reads the newest checkpoint into them and returns its step, or None if there is none.
            replicas: the process group of ranks that hold the same shard; without it, all ranks hold the same.
        """
        raise NotImplementedError

    def steps(self, start: int, end: int) -> Iterator[int]:
        """Yields step numbers, and commits each step when its body ends."""
        for step in range(start, end):
            yield step
            self.commit(step + 1)

    def commit(self, step: int) -> None:
        """Notes that the state is whole, and of this step.  Call it after the scheduler's step, before evaluation."""
        raise NotImplementedError

    def attach(self, late: Late, made: Any) -> None:
        """Gives the state of `late` to the object that a framework has made."""
        late.attach(made)


class SingleRound(Round):
    """The round of a rank that does not recover in place: the state comes from a checkpoint, or is new."""

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__()
        self._watch = watch

    def share(self, *state: Any, load: sharing.Load | None = None, replicas: Any = None) -> int:
        if self._watch is not None:
            self._watch.before_share(state)
        step = self._shared_step(state, load, replicas)
        if self._watch is not None:
            self._watch.shared(state, step)
        return step

    def _shared_step(self, state: Sequence[Any], load: sharing.Load | None, replicas: Any) -> int:
        if _ROUND_VARIABLE in os.environ and dist.is_initialized():
            # The agent may have given its socket to other ranks and not to this one.  Their `share` waits for ours.
            kept = Kept(lambda: None)
            kept.close()
            return _share(kept, state, load, replicas, None, self.number).step
        loaded = None if load is None else load()
        return loaded or 0

    def commit(self, step: int) -> None:
        page.commit(step)
        if self._watch is not None:
            self._watch.committed(step)


class RoundInPlace(Round):
    def __init__(self, link: Link, kept: Kept, old_groups: list[weakref.ref[Any]], watch: Watch | None) -> None:
        super().__init__()
        self._watch = watch
        self._link = link
        self._kept = kept
        self._old_groups = old_groups
        self._vote: Vote | None = None

    def share(self, *state: Any, load: sharing.Load | None = None, replicas: Any = None) -> int:
        if self._watch is not None:
            self._watch.before_share(state)
        try:
            shared = _share(self._kept, state, load, replicas, self._link, self.number)
        except sharing.LostStateError:
            self._wait_for_fresh_processes()
        except sharing.DifferentStatesError:
            self._link.send(messages.DIFFER, round=self.number)
            raise
        self._kept.adopt(state, shared.step)
        self._kept.clear_gradients()
        if shared.needs_votes:
            self._vote = Vote(self._kept, dist.barrier)
            self._kept.hold_vote = self._vote.hold
        page.commit(shared.step)
        self._link.send(messages.SHARED, round=self.number, step=shared.step, source=shared.source)
        self._release_old_groups()
        if self._watch is not None:
            self._watch.shared(state, shared.step)
        return shared.step

    def steps(self, start: int, end: int) -> Iterator[int]:
        self._kept.note_versions()
        yield from super().steps(start, end)

    def commit(self, step: int) -> None:
        if step > self._kept.step:
            self._kept.commit(step)
            page.commit(step)
            if self._watch is not None:
                self._watch.committed(step)
            if self._vote is not None:
                self._vote.raise_if_cut()

    def attach(self, late: Late, made: Any) -> None:
        super().attach(late, made)
        if isinstance(made, torch.nn.Module):
            self._kept.hold(self._kept.objects)

    def _release_old_groups(self) -> None:
        """Frees what the last round's groups have open, if something holds them.  Slow, so it comes last."""
        alive = [group for each in self._old_groups if (group := each()) is not None]
        if alive:
            torch_private.release_from_meshes(alive)
            gc.collect()  # modules of FSDP, for one, are in cycles
            _drop(alive)

    def _wait_for_fresh_processes(self) -> None:
        print("aelastic: no rank has a whole state, and there is no checkpoint", file=sys.stderr, flush=True)
        self._link.send(messages.LOST, round=self.number)
        self._link.wait_to_be_ended(_STOP_S)
        os._exit(1)


def _share(
    kept: Kept, state: Sequence[Any], load: sharing.Load | None, replicas: Any, link: Link | None, number: int
) -> sharing.Shared:
    """The collectives of `Round.share`."""
    if not state:
        raise ValueError("share: name the objects that hold the state, such as the model and the optimizer")
    if replicas is None and is_sharded(state):
        raise ValueError("share: parameters are sharded; name the ranks that hold the same shard: replicas=GROUP")
    everyone = Wire(dist.group.WORLD, link, number)
    group = everyone if replicas is None else Wire(replicas, link, number)
    return sharing.share(kept, state, load, group, everyone)


_current: Round | None = None  # of the call that is running


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the function in each round, until the job has ended everywhere; returns its value."""
    if _current is not None:  # one decorated function calls another
        return function(_current, *args, **kwargs)
    connection = _connect()
    if connection is None:
        _complete_environment()
        watch = _watch(in_place=False)
        single = SingleRound(watch)
        if watch is not None:
            watch.begin(single.number, has_groups=bool(torch_private.groups()))
        with _running(single) as current:
            return function(current, *args, **kwargs)
    sockets = GroupSockets()
    link = Link(connection, sockets, torch_private.abort_groups)
    rounds = _Rounds(link, _watch(in_place=True))
    try:
        return rounds.run(function, args, kwargs)
    finally:
        rounds.kept.close()


def _watch(*, in_place: bool) -> Watch | None:
    """Returns the watch of this worker in a rehearsal; None outside of one."""
    if not os.environ.get(FOLDER_VARIABLE):
        return None
    from aelastic.training.rehearsed import watch

    return watch.of_this_process(in_place=in_place)


def _connect() -> socket.socket | None:
    connection = links.connect()
    if connection is None:
        return None
    if lacking := torch_private.missing():
        connection.close()
        print(
            f"aelastic: torch {torch.__version__} has no {lacking[0]}: failures restart all workers",
            file=sys.stderr,
            flush=True,
        )
        return None
    return connection


def _complete_environment() -> None:
    """Makes a script that was started by Python alone a job of one rank."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})


@contextlib.contextmanager
def _running(current: Round) -> Iterator[Round]:
    global _current  # noqa: PLW0603  one call at a time
    _current = current
    try:
        yield current
    finally:
        _current = None


class _Rounds:
    def __init__(self, link: Link, watch: Watch | None) -> None:
        self._link = link
        self._watch = watch
        self._number = -1
        self._patience_s = 0.0
        self.kept = Kept(lambda: link.check(self._number), lambda: link.begin_update(self._number), link.end_update)
        self._old_groups: list[weakref.ref[Any]] = []

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        while True:
            self._begin()
            if not self._link.is_over(self._number):
                is_over, result = self._call(function, args, kwargs)
                if not is_over:
                    return result
            self._link.leave(self._number)

    def _begin(self) -> None:
        """Waits at the safe point for the next round, and enters it."""
        self._link.send(messages.READY, round=self._number, step=self.kept.whole_step)
        begin = self._link.wait_for_begin(self._number)
        for name, value in begin["env"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._number = begin["round"]
        self._patience_s = begin["patience"]
        page.renew()
        self.kept.hold_vote = None
        self._link.sockets.begin()
        if self.kept.is_whole:
            self.kept.note_versions()

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Returns whether the round ended before the job did and, if it did not, the value of the function."""
        if self._watch is not None:
            self._watch.begin(self._number, has_groups=bool(torch_private.groups()), old_groups=self._old_groups)
        forming = Forming(self._link, self._number)
        hook = sys.excepthook  # each `init_process_group` wraps it
        result = None
        try:
            round_in_place = RoundInPlace(self._link, self.kept, self._old_groups, self._watch)
            with _running(round_in_place) as current, forming.watched():
                result = function(current, *args, **kwargs)
        except BaseException as error:
            if not is_consequence(error, self._link, self._number, self._patience_s):
                raise
            _clear_frames(error)
        else:
            self._link.send(messages.DONE, round=self._number)
            if self._link.wait_for_end(self._number):
                _drop(forming.groups).join(_DROP_S)
                return False, result
        sys.excepthook = hook
        self._leave(forming)
        return True, None

    def _leave(self, forming: Forming) -> None:
        """Destroys the groups.  The frames that used them are gone, but for what a cycle of references holds.

        The last reference to a group must not be that of DDP: its destructor joins gloo's threads with the GIL held,
        while one of them may wait for the GIL (torch 2.13).  That of a group releases the GIL, and takes 10 ms, which
        a thread spends.
        """
        torch_private.destroy_groups()
        self._old_groups = [weakref.ref(group) for group in forming.groups]
        _drop(forming.groups)


def _clear_frames(error: BaseException) -> None:
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and not any(each is other for other in seen):
        seen.append(each)
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def _drop(groups: list[Any]) -> threading.Thread:
    thread = threading.Thread(target=groups.clear, name="aelastic-groups", daemon=True)
    thread.start()
    return thread
