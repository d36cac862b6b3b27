"""The states in which a process lives and does not run on, and what people are told of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

KernelState: TypeAlias = Literal["stopped", "traced", "zombie", "uninterruptible"]
KERNEL_STATES: tuple[KernelState, ...] = get_args(KernelState)
WORDS: Mapping[str, str] = {
    "stopped": "stopped by a signal (SIGCONT continues it)",
    "traced": "stopped by a debugger",
    "zombie": "in zombie state: the main thread has ended",
    "uninterruptible": "in uninterruptible sleep: a disk or a device does not answer",
}


def told(states: Mapping[int, str]) -> str:
    """A sentence about the ranks that do not run on; empty if all do.

    Args:
        states: by rank.
    """
    parts = []
    for state in dict.fromkeys(states.values()):
        ranks = [str(rank) for rank in sorted(states) if states[rank] == state]
        named = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(ranks)} are"
        parts.append(f"{named} {WORDS.get(state, state)}")
    return "; ".join(parts)
