"""The states in which a process is alive but does not run, and their descriptions."""

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


def sentence_of(states: Mapping[int, str]) -> str:
    """Returns a sentence about the ranks that do not run; empty if all do.

    Args:
        states: the states, by rank.
    """
    parts = []
    for state in dict.fromkeys(states.values()):
        ranks = [str(rank) for rank in sorted(states) if states[rank] == state]
        named = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(ranks)} are"
        parts.append(f"{named} {WORDS.get(state, state)}")
    return "; ".join(parts)
