"""How all ranks get the newest whole step: which rank has it, which ranks receive it from where, and whether all agree.

Each rank claims a step, or two: see `vote`.  The newest step that all survivors have wins, otherwise the newest that
every replica group has.  The lowest rank of a group that has it sends it to the others of the group.  If a group has no
whole state, all ranks load the newest checkpoint; without one, only ranks that have never had a state may begin with
what the script has made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import distributed as dist

from aelastic.training.kept import NO_STEP, Kept
from aelastic.training.shared_state import moving
from aelastic.training.shared_state.fingerprint import fingerprint, size
from aelastic.training.shared_state.state import State, move
from aelastic.training.shared_state.wire import Wire

Load = Callable[[], int | None]

# A comparison takes about a millisecond for 2 MB (CPU, 2 cores).  A larger state is compared in the first rounds only.
_COMPARED_ALWAYS = 16 << 20  # bytes
_COMPARED_FIRST = 2


_CHANGED = (
    "aelastic: share: parameters have changed since this round began, so this rank gives its state to nobody. "
    "Is the model wrapped before round.share()?"
)


class LostStateError(Exception):
    """A replica group has no whole state, and there is no checkpoint: the job must begin in fresh processes."""

    def __init__(self) -> None:
        super().__init__("share: no rank has a whole state, and there is no checkpoint")


class DifferentStatesError(RuntimeError):
    """Ranks of one replica group, which should have the same state, do not."""


class DifferentCheckpointsError(RuntimeError):
    """Ranks have loaded checkpoints of different steps: one may have been written meanwhile, and a restart helps."""


@dataclass(frozen=True)
class Claim:
    """What a rank reports to all others."""

    step: int
    older: int  # another step, of which it has a copy
    group: int  # the lowest rank of its replica group
    is_fresh: bool
    is_voting: bool  # sees its updates, and can vote before them
    fingerprints: int
    bytes: int

    @property
    def steps(self) -> set[int]:
        return {self.step, self.older} - {NO_STEP}


@dataclass(frozen=True)
class Shared:
    step: int
    source: int  # the rank that this one has the state from, which may be itself; -1: from a checkpoint, or it is new
    needs_votes: bool  # without votes, a loss could leave replica groups a step apart


def share(kept: Kept, objects: Sequence[Any], load: Load | None, replicas: Wire, everyone: Wire) -> Shared:
    """Brings this rank to the newest whole step.  Every rank of the job calls it.

    Args:
        kept: what this rank has.
        objects: those that receive the state.
        load: as in `Round.share`.
        replicas: the ranks that hold the same shard.
        everyone: all ranks.

    Raises:
        LostStateError: see there; every rank raises it.
        DifferentStatesError, DifferentCheckpointsError: see there.
    """
    if not kept.check_versions():
        print(_CHANGED, file=sys.stderr, flush=True)
    if kept.is_whole or kept.older is not None:
        kept.rewind()
        _check_objects(kept.objects, objects)
    claims = _exchange(kept, kept.whole_step, objects, replicas, everyone)
    needs_votes = are_votes_needed(claims)
    step = newest_common_step(claims)
    if step != NO_STEP:
        source = _transfer(kept, step, claims, objects, replicas)
        if _is_compared(claims) and not _are_equal(objects, replicas):
            raise _differ(replicas, step)
        kept.fingerprints += 1
        return Shared(step, source, needs_votes)
    if load is None and any(not each.is_fresh for each in claims):
        raise LostStateError
    return Shared(_begin(kept, objects, load, replicas, everyone), -1, needs_votes)


def newest_common_step(claims: Sequence[Claim]) -> int:
    """Returns the newest step that all survivors have, or else that each replica group has; NO_STEP without one.

    A newer one that some ranks of each group have would be at risk: a rank that is sent it has no other step from then
    on, and one that is lost before it has sent it leaves its group without.
    """
    steps: dict[int, set[int]] = {}
    for claim in claims:
        steps.setdefault(claim.group, set()).update(claim.steps)
    in_each_group = set.intersection(*steps.values())
    in_all_survivors = in_each_group.intersection(*(claim.steps for claim in claims if claim.steps))
    return max(in_all_survivors or in_each_group, default=NO_STEP)


def are_votes_needed(claims: Sequence[Claim]) -> bool:
    """Whether there are several replica groups, and in one of them a rank can be lost that another one replaces.

    If one rank cannot recover in place, none does, and that rank would not come to the vote.
    """
    groups = {each.group for each in claims}
    return 1 < len(groups) < len(claims) and all(each.is_voting for each in claims)


def _check_objects(kept: Sequence[Any], objects: Sequence[Any]) -> None:
    before, now = ([type(each).__name__ for each in some] for some in (kept, objects))
    if before != now:
        raise ValueError(f"share: the objects were {before} in the last round, and are {now} in this one")


def _exchange(kept: Kept, step: int, objects: Sequence[Any], replicas: Wire, everyone: Wire) -> list[Claim]:
    mine = Claim(
        step, kept.older_step, min(replicas.ranks), kept.is_fresh, kept.is_watching, kept.fingerprints, size(objects)
    )
    claims = []
    for claimed, older, of, is_fresh, is_voting, fingerprints, its_size in everyone.gather(astuple(mine)):
        claims.append(Claim(claimed, older, of, bool(is_fresh), bool(is_voting), fingerprints, its_size))
    return claims


def _transfer(kept: Kept, step: int, claims: list[Claim], objects: Sequence[Any], replicas: Wire) -> int:
    """Gives every rank of the group the state of this step; returns the rank that this one has it from."""
    take_own(kept, step, objects)
    return _spread(kept, [rank for rank in replicas.ranks if step in claims[rank].steps], objects, replicas)


def take_own(kept: Kept, step: int, objects: Sequence[Any]) -> None:
    """Gives the objects this rank's own state of the step, if it has that."""
    if kept.whole_step == step:
        if kept.holds_other_than(objects):
            move(State(kept.objects), objects)
    elif kept.older is not None and kept.older.step == step:
        move(kept.older.state, objects)
        kept.adopt(objects, step)  # all survivors have it, so nobody will need the newer one


def _spread(kept: Kept, holders: Sequence[int], objects: Sequence[Any], replicas: Wire) -> int:
    """Sends the state of the holders to the other ranks of the group; each rank sends it to two others at most."""
    others = [rank for rank in replicas.ranks if rank not in holders]
    senders = [*holders, *others]
    source = rank = dist.get_rank()
    if rank in others:
        source = senders[others.index(rank) // 2]
        if not kept.holds_other_than(objects):
            kept.tear()  # from here on, the state is partly that of another rank
        moving.receive(objects, source, replicas)
    targets = [other for index, other in enumerate(others) if senders[index // 2] == rank]
    if targets:
        state = State(objects)
        for target in targets:
            moving.send(state, target, replicas)
    return source


def _begin(kept: Kept, objects: Sequence[Any], load: Load | None, replicas: Wire, everyone: Wire) -> int:
    """Loads the newest checkpoint on all ranks, or begins with the state that the script has made."""
    loaded = (load() if load is not None else None) or NO_STEP  # some return 0 if there is no checkpoint
    if loaded != NO_STEP:
        kept.tear()
        kept.older = None
    claims = _exchange(kept, loaded, objects, replicas, everyone)
    steps = {each.step for each in claims}
    if steps == {NO_STEP} and not all(each.is_fresh for each in claims):
        raise LostStateError
    step = newest_common_step(claims)
    if step == NO_STEP and steps != {NO_STEP}:
        raise DifferentCheckpointsError(f"share: ranks have loaded checkpoints of different steps: {sorted(steps)}")
    _spread(kept, [rank for rank in replicas.ranks if claims[rank].step == step], objects, replicas)
    if _is_compared(claims) and not _are_equal(objects, replicas):
        if step != NO_STEP:
            raise _differ(replicas, step)
        # A script may leave it to DDP to give all ranks the same parameters.
        _spread(kept, replicas.ranks[:1], objects, replicas)
    kept.fingerprints += 1
    return max(step, 0)


def _differ(replicas: Wire, step: int) -> DifferentStatesError:
    return DifferentStatesError(f"share: ranks {replicas.ranks} should have equal states of step {step}, but differ")


def _is_compared(claims: list[Claim]) -> bool:
    largest = max(each.bytes for each in claims)
    return largest <= _COMPARED_ALWAYS or max(each.fingerprints for each in claims) < _COMPARED_FIRST


def _are_equal(objects: Sequence[Any], replicas: Wire) -> bool:
    return len({tuple(each) for each in replicas.gather([fingerprint(objects)])}) == 1
