"""Searches for an order of a register's operations that explains every answer (Wing and Gong, with Lowe's memory).

Each operation takes effect at one moment between its call and its answer.  An operation that was never answered takes
effect at any later moment, or never.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """An operation: a compare-and-set, or a read if `new` is `None`."""

    called: float
    answered: float  # `math.inf`: never
    result: bytes | None  # the register's value then; `None` if unknown
    expected: bytes = b""
    new: bytes | None = None

    def apply(self, text: bytes) -> bytes | None:
        """The register after it; `None` if that contradicts its answer."""
        after = self.new if self.new is not None and text == self.expected else text
        return after if self.result in {None, after} else None


def is_linearizable(history: list[Op]) -> bool:
    ops = sorted((op for op in history if op.new is not None or op.result is not None), key=lambda op: op.called)
    must = sum(1 << index for index, op in enumerate(ops) if op.answered < math.inf)
    stack: list[tuple[int, bytes]] = [(0, b"")]  # the operations that have taken effect, and the text then
    known = set(stack)
    while stack:
        done, text = stack.pop()
        if done & must == must:
            return True
        for bit, op in _may_be_next(ops, done):
            if (after := op.apply(text)) is not None and (state := (done | bit, after)) not in known:
                known.add(state)
                stack.append(state)
    return False


def _may_be_next(ops: list[Op], done: int) -> list[tuple[int, Op]]:
    """The operations called before the first answer to one that has not taken effect yet."""
    open_ops: list[tuple[int, Op]] = []
    first_answer = math.inf
    left = (1 << len(ops)) - 1 & ~done
    while left:
        bit = left & -left
        op = ops[bit.bit_length() - 1]
        if op.called > first_answer:
            break
        first_answer = min(first_answer, op.answered)
        open_ops.append((bit, op))
        left ^= bit
    return [(bit, op) for bit, op in open_ops if op.called <= first_answer]
