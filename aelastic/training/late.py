"""Parts of the state that `Round.share` cannot take as they are: `Late` and `Value`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Late:
    """A placeholder in `Round.share` for an object that a framework makes later, such as its optimizer.

    Keeps the state until `Round.attach` gives it to that object; from then on, its state is that of the object.
    """

    def __init__(self) -> None:
        self.made: Any = None
        self._state: Any = None

    def attach(self, made: Any) -> None:
        """Gives the state to the object, if there is one.  Called by `Round.attach`."""
        state = self.state_dict()
        self.made, self._state = made, None
        if state is not None:
            made.load_state_dict(state)

    def state_dict(self) -> Any:
        return self._state if self.made is None else self.made.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._state, self.made = state, None


class Value:
    """Holds what has no `state_dict`, such as a loop's counters: set `value` just before each commit, and only then."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value
