"""Is there an order of a register's operations that explains every answer?  (Wing and Gong; with Lowe's memory.)

Each operation takes effect at one moment between its call and its answer.  One that was never answered takes effect at
any later moment, or never.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """An operation: a compare-and-set, or a read if `new` is `None`."""

    called: float
    answered: float  # `math.inf`: never
    result: bytes | None  # what the register held then; `None`: not known
    expected: bytes = b""
    new: bytes | None = None

    def apply(self, text: bytes) -> bytes | None:
        """The register after it; `None`: it cannot have been answered so."""
        after = self.new if self.new is not None and text == self.expected else text
        return after if self.result in {None, after} else None


def is_linearizable(history: list[Op], initial: bytes = b"") -> bool:
    ops = sorted((op for op in history if op.new is not None or op.result is not None), key=lambda op: op.called)
    must = sum(1 << index for index, op in enumerate(ops) if op.answered < math.inf)
    stack: list[tuple[int, bytes]] = [(0, initial)]  # which have taken effect, and the text then
    known = set(stack)
    while stack:
        done, text = stack.pop()
        if done & must == must:
            return True
        first_answer = min((op.answered for index, op in enumerate(ops) if not done >> index & 1), default=math.inf)
        for index, op in enumerate(ops):
            if op.called > first_answer:
                break
            if done >> index & 1 or (after := op.apply(text)) is None:
                continue
            state = (done | 1 << index, after)
            if state not in known:
                known.add(state)
                stack.append(state)
    return False
