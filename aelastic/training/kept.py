"""What this process keeps across rounds: the objects that hold the state, its step, and whether it is whole.

The state is whole from a commit until the next update begins.  An update begins in an optimizer's step, after its
closure has made the gradients, and never once the round is over: a script may have swallowed the error of a collective,
and its gradients would not be those of all ranks.  If the round ends during an update, the end waits for the commit:
otherwise a script with two optimizers could lose the state, if the round ends between their steps on all ranks, as it
may when a node joins or is drained.  An update without an optimizer of torch shows in the versions of the
parameters (`Tensor._version`), which any change raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from aelastic.training import torch_private
from aelastic.training.late import Late

NO_STEP = -1
_MODE = attrgetter("training")  # quicker than a comprehension: it reads each module in each step
# Batch normalization changes its buffers without raising their versions.  Larger ones, such as masks, raise theirs.
_SMALL_BUFFER = 65536  # elements: more than any normalization has channels


@dataclass(frozen=True)
class Older:
    """A copy of the step before the one that was committed last."""

    step: int
    state: Any  # a `State`


class Kept:
    def __init__(
        self,
        check: Callable[[], None],
        hold_end: Callable[[], bool] = lambda: False,
        release_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Watches the updates of all optimizers from now on.

        Args:
            check: raises if the round is over.
            hold_end: makes the end of the round wait for the commit of an update; returns whether it is over.
            release_end: called once the state is whole again.
        """
        self.step = NO_STEP
        self.is_whole = False
        self.is_watching = True
        self.is_fresh = True  # as the script has made it, changed neither by a step nor by another rank's state
        self.objects: Sequence[Any] = ()
        self.fingerprints = 0  # how often this job has compared them
        self.hold_vote: Callable[[], None] | None = None  # where a loss could leave replica groups a step apart
        self.older: Older | None = None
        self._check = check
        self._hold_end, self._release_end = hold_end, release_end
        self._modules: list[torch.nn.Module] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._modes: list[bool] = []
        self._buffers: list[_Buffer] = []
        self._small_buffers: _SmallBuffers | None = None
        self._versions: list[int] | None = None
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._remove_scaler_hook = torch_private.register_scaler_update_pre_hook(self._before_scaler_update)

    def close(self) -> None:
        """Stops watching."""
        self.is_watching = False
        self._hook.remove()
        self._remove_scaler_hook()

    @property
    def whole_step(self) -> int:
        return self.step if self.is_whole else NO_STEP

    @property
    def older_step(self) -> int:
        return NO_STEP if self.older is None else self.older.step

    def note_versions(self) -> None:
        """Notes the parameters' versions before anything may change them unnoticed; no-op if the last commit did."""
        if self._versions is None:
            self._versions = self._versions_now()

    def check_versions(self) -> bool:
        """Whether no parameter has changed since the commit, or since the round began; otherwise the state is torn."""
        if self.is_whole and self._versions is not None and self._versions != self._versions_now():
            self.tear()
            return False
        return True

    def tear(self) -> None:
        self.is_whole = False
        self.is_fresh = False

    def holds_other_than(self, objects: Sequence[Any]) -> bool:
        """Whether the state is in other objects than these, and stays there when these are changed."""
        return any(old is not new for old, new in zip(self.objects, objects, strict=False))

    def adopt(self, objects: Sequence[Any], step: int) -> None:
        """From now on, these objects hold the whole state of this step."""
        self.tear()
        self.older = None
        self.hold(objects)
        self.commit(step)

    def hold(self, objects: Sequence[Any]) -> None:
        """From now on, these objects hold the state, whole or not."""
        self.objects = objects
        self._modules = [module for each in modules_of(objects) for module in each.modules()]
        # Looked up now: in the middle of a step, modules of FSDP have other parameters, which are not sharded.
        self._parameters = [each for module in modules_of(objects) for each in module.parameters()]
        self._modes = list(map(_MODE, self._modules))
        self._buffers = [_Buffer(module, name) for module in self._modules for name in torch_private.buffers_of(module)]
        self._small_buffers = None

    def commit(self, step: int) -> None:
        """Notes that the state is whole, and that of this step.  Called once a step, so it takes only microseconds."""
        if self.is_whole:  # no optimizer has made an update: there was none to make, or it was made by other means
            self._check_other_objects()
            self._versions = self._versions_now()
        else:
            self._versions = None
        self._modes = list(map(_MODE, self._modules))
        self._copy_buffers()
        self.step, self.is_whole, self.is_fresh = step, True, False
        self._release_end()

    def rewind(self) -> None:
        """Undoes what the lost step's forward pass has done to buffers, and an evaluation to `training`."""
        for module, mode in zip(self._modules, self._modes, strict=True):
            module.training = mode
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.rewind()

    @contextmanager
    def buffers_as_committed(self) -> Iterator[None]:
        """Gives buffers their values at the commit within the `with` block, and then those they have now."""
        with ExitStack() as stack:
            for buffer in self._buffers:
                stack.enter_context(buffer.as_committed())
            yield

    def clear_gradients(self) -> None:
        """Clears gradients: many loops do so after the update, so those of a lost step would be added to the next.

        A `GradScaler` notes whose gradients it has unscaled, and would not unscale the next ones.
        """
        for each in made(self.objects):
            if hasattr(each, "zero_grad"):
                each.zero_grad(set_to_none=True)
            torch_private.forget_unscaled(each)

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called by torch before the step of any optimizer; the return value replaces the arguments."""
        is_positional = len(args) > 1  # after the optimizer itself
        closure = args[1] if is_positional else kwargs.get("closure")
        if closure is None:
            self.begin_update()
            return None

        def closure_then_update() -> Any:
            loss = closure()
            self.begin_update()
            return loss

        if is_positional:
            return (args[0], closure_then_update, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_update}

    def begin_update(self) -> None:
        """Called before an update, when this rank has its gradients.

        Raises:
            RoundOver: the round is over, so the update must not be made.
        """
        if self.hold_vote is None:
            self._check()
        elif self.is_whole:
            self._check()
            self.hold_vote()
        is_over = self._hold_end()
        # If all ranks have voted for this step, any optimizer's update is made, even if the round is over.
        if is_over and self.hold_vote is None:
            self._check()
        self.tear()

    def _before_scaler_update(self) -> None:
        """A `GradScaler` may have skipped the update; then its own is the first change of the step."""
        if self.hold_vote is not None and self.is_whole:
            self.begin_update()

    def _check_other_objects(self) -> None:
        """Checks at the end of a step without an update, such as one that a `GradScaler` skips.

        If the round is over, the step is lost, and what it has done to a scheduler or a scaler cannot be undone.
        """
        try:
            self._check()
        except BaseException:
            if not all(isinstance(each, torch.nn.Module | torch.optim.Optimizer) for each in made(self.objects)):
                self.tear()
            raise

    def _versions_now(self) -> list[int]:
        return [torch_private.version(each) for each in self._parameters]

    def _copy_buffers(self) -> None:
        if not self._buffers:
            return
        small = self._small_buffers
        if small is None or not small.copy():
            self._copy(self._buffers)
            self._small_buffers = _SmallBuffers(self._buffers)
        elif small.others:
            self._copy(small.others)

    def _copy(self, buffers: list[_Buffer]) -> None:
        targets, sources = [], []
        for buffer in buffers:
            if pair := buffer.to_copy():
                targets.append(pair[0])
                sources.append(pair[1])
        if targets:
            with torch.no_grad():
                torch_private.copy_all(targets, sources)


class _Buffer:
    """One buffer of a module, and its value at the last commit."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._buffers = torch_private.buffers_of(module)
        self._name = name
        self._kept: torch.Tensor | None = None
        self._live: torch.Tensor | None = None
        self._version = -1

    @property
    def place(self) -> tuple[dict[str, torch.Tensor | None], str]:
        """The module's dictionary of buffers, and the buffer's name in it."""
        return self._buffers, self._name

    @property
    def live(self) -> torch.Tensor | None:
        """The tensor that was there at the last commit."""
        return self._live

    def keep_in(self, copy: torch.Tensor) -> None:
        """Keeps the value at the last commit in this tensor, which already has it."""
        self._kept = copy

    def to_copy(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the copy and the tensor to copy into it; None if the copy is up to date."""
        live = self._buffers.get(self._name)
        if live is None:
            self._live = self._kept = None
            return None
        is_same = live is self._live
        if is_same and torch_private.version(live) == self._version and live.numel() > _SMALL_BUFFER:
            return None
        self._live, self._version = live, torch_private.version(live)
        if not is_same or self._kept is None:
            self._kept = live.detach().clone()
            return None
        return self._kept, live.detach()

    @contextmanager
    def as_committed(self) -> Iterator[None]:
        now = self._buffers.get(self._name)
        self._buffers[self._name] = self._kept
        try:
            yield
        finally:
            self._buffers[self._name] = now

    def rewind(self) -> None:
        if self._live is None or self._kept is None:
            return
        self._buffers[self._name] = self._live  # the lost step may have replaced it with another tensor
        self._live.copy_(self._kept)


class _SmallBuffers:
    """Buffers such as those of batch normalization, copied with one call of torch for all that are alike.

    A step can be as short as a millisecond and have dozens of buffers: copying each would take a few percent of it.
    """

    def __init__(self, buffers: Sequence[_Buffer]) -> None:
        """Takes over the copies that these buffers have; `others` are those that are copied one by one."""
        self.others: list[_Buffer] = []
        self._places = [buffer.place for buffer in buffers]
        self._live = [buffer.live for buffer in buffers]
        self._alike: list[tuple[Callable[..., torch.Tensor], list[torch.Tensor], torch.Tensor]] = []
        groups: dict[tuple[Any, ...], list[tuple[_Buffer, torch.Tensor]]] = {}
        for buffer in buffers:
            live = buffer.live
            if live is None or type(live) is not torch.Tensor or not _is_small(live):
                self.others.append(buffer)
            else:
                groups.setdefault((live.dim(), live.dtype, live.device), []).append((buffer, live))
        for (dim, _, _), group in groups.items():
            live_ones = [live for _, live in group]
            join = torch.cat if dim else torch.stack
            joined = join(live_ones)
            copies = joined.split([len(live) for live in live_ones]) if dim else joined.unbind()
            for (buffer, _), copy in zip(group, copies, strict=True):
                buffer.keep_in(copy)
            self._alike.append((join, live_ones, joined))

    def copy(self) -> bool:
        """Copies them; returns False instead if a module has another tensor or another buffer than before."""
        if not all(map(is_, [buffers.get(name) for buffers, name in self._places], self._live)):
            return False
        for join, live, joined in self._alike:
            join(live, out=joined)
        return True


def _is_small(buffer: torch.Tensor) -> bool:
    return buffer.dim() < 2 and buffer.numel() <= _SMALL_BUFFER and not buffer.requires_grad


def made(objects: Sequence[Any]) -> Iterator[Any]:
    """Yields the objects, with each `Late` one replaced by the object that the framework has made."""
    for each in objects:
        yield each.made if isinstance(each, Late) and each.made is not None else each


def modules_of(objects: Sequence[Any]) -> Iterator[torch.nn.Module]:
    return (each for each in made(objects) if isinstance(each, torch.nn.Module))
