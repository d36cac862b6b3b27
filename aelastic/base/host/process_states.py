"""Finds processes that are alive but do not run, from the kernel: `proc_pid_stat(5)`, field 3."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from aelastic.base.host import proc_table
from aelastic.base.host.files import text_of
from aelastic.base.host.kernel_states import KernelState

# Every process that reads a file is in state D for moments, and one that has ended is a zombie until its agent looks.
SETTLED_S = 1.0

_STATE, _SESSION, _BEGAN = 0, 3, 19  # counted from the state, which follows the name
_AT_ONCE: Mapping[bytes, KernelState] = {b"T": "stopped", b"t": "traced"}
_SETTLED: Mapping[bytes, KernelState] = {b"Z": "zombie", b"D": "uninterruptible"}


class ProcessStates:
    """Looks at the same processes repeatedly."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}  # for processes in `_SETTLED` at the last look

    @property
    def may_be_new(self) -> bool:
        """Whether a look in `SETTLED_S` may find more: some have only just entered a state that must last."""
        return bool(self._since)

    def look(self, pids: Mapping[int, Any], now: float) -> dict[int, KernelState]:
        """Returns the states of session leaders, such as workers, that do not run.

        Args:
            pids: pids by any key; values that are not numbers are ignored.
            now: monotonic, in seconds.
        """
        before, self._since = self._since, {}
        found: dict[int, KernelState] = {}
        for key, pid in pids.items():
            fields = proc_table.stat_fields(pid) if isinstance(pid, int) else None
            if fields is None or int(fields[_SESSION]) != pid:
                continue
            state = fields[_STATE]
            if state in _AT_ONCE:
                found[key] = _AT_ONCE[state]
            elif state in _SETTLED:
                # Another sleep is another state: the kernel counts how often the process has yielded its CPU.
                which = pid, fields[_BEGAN], state, _switches(pid) if state == b"D" else ""
                since = self._since[which] = before.get(which, now)
                if now - since >= SETTLED_S:
                    found[key] = _SETTLED[state]
        return found


def _switches(pid: int) -> str:
    lines = text_of(f"/proc/{pid}/status").splitlines()
    return next((line for line in lines if line.startswith("voluntary_ctxt_switches:")), "")
