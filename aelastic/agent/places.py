"""Where the workers of this node are: their stacks, folded for a comparison with those of other nodes."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence

from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.host.files import text_of
from aelastic.base.host.proc_table import stat_fields
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.failures.places import Place
from aelastic.diagnose.stacks.format import Frame, Thread
from aelastic.diagnose.stacks.places import place_of

_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
# The system call `futex`: a thread that waits for another one, or for its turn.
_FUTEX = {"x86_64": "202", "aarch64": "98"}


def places_of(
    group: WorkerGroup,
    threads_of: Callable[[int], Sequence[Thread] | str],
    failed: Mapping[int, ProcessFailure],
    steps: Mapping[int, int],
) -> list[Place]:
    """Returns where each worker is, according to its last stack; ordered by local rank.

    Args:
        group: the workers.
        threads_of: returns the threads of a local rank, the main one first, or why they are not known.
        failed: failures that are not reported yet, by local rank.
        steps: the steps of workers, as far as known, by local rank.
    """
    host, places = socket.gethostname(), list[Place]()
    for worker in group.workers:
        rank, pid = worker.local_rank, worker.id if isinstance(worker.id, int) else 0
        place = Place(worker.global_rank, host, pid, steps=steps.get(rank, -1))
        failure = failed.get(rank) or group.exits.failed.get(rank)
        if failure is not None and (rank in failed or failure.names_lost_peer):
            # It has waited: its traceback shows where.
            frames = [Frame(file, int(line), name) for file, line, name in _FRAME.findall(failure.traceback)]
            place = place_of(place, [Thread("MainThread", tuple(reversed(frames)))])
            place = place.replace(unknown="", collective=place.collective or "a collective")
        elif rank not in group.exits.alive:
            place = place.replace(ended="has ended")
        elif isinstance(threads := threads_of(rank), str):
            place = place.replace(unknown=threads, state=_state_of(pid))
        else:
            place = place_of(place.replace(state=_state_of(pid)), threads)
        places.append(place)
    return places


def _state_of(pid: int) -> str:
    """Returns the state of a process's main thread, from the kernel."""
    fields = stat_fields(pid)
    state = fields[0].decode() if fields else ""
    is_on_lock = state == "S" and text_of(f"/proc/{pid}/syscall").partition(" ")[0] == _FUTEX.get(platform.machine())
    return "lock" if is_on_lock else state
