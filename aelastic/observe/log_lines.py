"""What a person who watches a run wants to know, when it happens: the agent's own log lines."""

from __future__ import annotations

import logging

from aelastic.failures.failure import MESSAGE_CHARS_MAX, ProcessFailure
from aelastic.group.events import Event, Exited, FoundUnhealthy, StopRequested
from aelastic.group.worker_group import WorkerGroup
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, Outcome

_log = logging.getLogger(__name__)


def log_event(event: Event, group: WorkerGroup, link_error: BaseException | None) -> None:
    """Says what an event means, which the group has handled.

    Args:
        link_error: why the rendezvous is lost, if it is.
    """
    match event:
        case Exited(failure=ProcessFailure() as failure):
            _log.warning("rank %d failed on %s: %s", failure.rank, failure.host, _brief(failure))
        case FoundUnhealthy(local_rank=local_rank, failure=failure) if group.failed.get(local_rank) is failure:
            _log.warning(
                "rank %d on %s is stopped: %s", failure.rank, failure.host, failure.message[:MESSAGE_CHARS_MAX]
            )
        case Interrupted(_, reason):
            _log.warning("all workers start again: %s", reason)
        case Assigned(round_, _, ranks):
            _log.info(
                "round %d: group rank %d of %d, world size %d",
                round_,
                ranks.group_rank,
                ranks.group_world_size,
                ranks.world_size,
            )
        case Ended(Outcome.FAILED, reason, cause) if cause is not None and group.alive and not group.failed:
            _log.warning("the job has failed: %s", reason)  # elsewhere; the report comes once our workers have ended
        case Ended(outcome, reason):
            _log.info("the job has %s: %s", outcome, reason)
        case StopRequested() if link_error is not None:
            _log.warning("the agent leaves: %s", link_error)
        case StopRequested(signum) if group.is_killing:
            _log.warning("asked again (signal %d): workers are killed", signum)
        case StopRequested(signum) if not group.is_done:
            within_s = group.spec.shutdown_timeout_s
            _log.warning("asked to stop (signal %d): workers end within %g s; ask again to kill them", signum, within_s)
        case _:
            pass


def _brief(failure: ProcessFailure) -> str:
    return failure.message[:MESSAGE_CHARS_MAX]
