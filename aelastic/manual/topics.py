"""The entry of the troubleshooting page that explains a message: `(help: TOPIC)` at the end of its line.

An error of ours carries its topic (`AelasticError.topic`); a log line has it by its message, in `TOPICS`.  Only
messages whose reader needs more than the line have one.  `make docs` writes `topics.md`, which has the entries, from
docs/reference/troubleshooting.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

# By topic: the messages, as the calls of the logger have them, before values are filled in.
_LINES: Mapping[str, tuple[str, ...]] = {
    "a-drain-notice-cannot-be-read": (
        "notice command: %.80r is not a notice: print 'drain SECONDS REASON' or 'cancel'",
        "notice file %s: %.80r is not a notice; draining within %g s",
    ),
    "a-health-check-server-failed": (
        "the health check server's %s failed: %s: %s",
        "the health check server's %s did not return within %g s; the job continues without it",
    ),
    "a-pattern-of-a-rule-is-too-slow": (
        "the pattern %r took more than %g ms on %.200r and is treated as not matching",
        "the pattern %r could not be searched for and is treated as not matching: %s",
    ),
    "a-process-survived-sigkill": ("process %d, which %s, survived SIGKILL",),
    "another-program-answers-at-the-endpoint": (
        (
            "%s accepts connections, but has not answered as a TCPStore for %g s: is it still starting, or does "
            "another program use that port? waiting up to %g s"
        ),
    ),
    "log-files-cannot-be-shortened": (
        "the file system of %s cannot free parts of files: --keep-log-size has no effect",
    ),
    "no-control-socket": ("no control socket, so aelastic status cannot reach this job: %s: %s",),
    "progress-is-not-posted": (
        "%s is set, but %s is not: progress is not posted",
        "%s=%s is not an https URL: progress is not posted",
        (
            "progress cannot be posted to the Trainer (%s); the job continues: check the KUBEFLOW_TRAINER_SERVER_ "
            "variables"
        ),
    ),
    "stacks-cannot-be-taken": ("hangs cannot be explained: the stack of rank %d cannot be read: %s",),
    "the-config-has-no-run-id": (
        "config has no run_id, and no other node can join under the random one, %s: set run_id",
    ),
    "the-endpoint-name-belongs-to-several-hosts": (
        (
            "the rendezvous endpoint %s is this host and others (%s), whose agents would form separate jobs: list one "
            "endpoint for each host, separated by commas, or use --rdzv-conf endpoints=N"
        ),
    ),
    "the-guard-process-died": (
        "the guard process died %d times; if the agent is killed now, its workers may be left running",
        "no guard process (%s); if the agent is killed now, its workers may be left running",
    ),
    "the-health-server-cannot-answer": ("the health server cannot accept connections for now: %s",),
    "the-host-is-out-of-processes-or-memory": (
        "this host cannot start more threads (ulimit -u, pids.max): output may be late",
    ),
    "the-job-has-no-secret": (
        (
            "agents talk over %s without a secret: anyone who reaches this port can join, restart or end the job, and "
            "read its state; use --secret-file"
        ),
    ),
    "the-job-runs-through-the-rendezvous-of-torch": (
        (
            "could not empty the workers' store, so restarted workers may fail: the TCPStore of this torch cannot "
            "list its keys: use torch 2.13 or newer"
        ),
        "could not empty the workers' store, so restarted workers may fail: %s",
    ),
    "the-node-is-unfit": ("the health check failed to decide, so this node is treated as fit: %s",),
    "the-record-has-another-secret": ("ignoring %s: %s; is --secret-file the same on every node?",),
    "the-secret-file-cannot-be-used": ("the secret changed and cannot be read; the previous one is still used: %s",),
    "the-store-of-the-workers-cannot-be-served": (
        "%s; no store is served until the next round: %d starts have failed",
    ),
    "the-store-was-restarted": ("%s: another program wrote over the record of this leader: registering it again",),
    "this-node-lost-all-others": (
        "lost all other nodes at once: stepping down as leader for %.1f s, so that another agent can take over",
    ),
    "torch-is-not-installed": ("the workers' store cannot be served (exit code %s): check that %s can import torch",),
    "traces-are-not-sent": ("traces cannot be sent to the OpenTelemetry collector; the job continues",),
}
TOPICS: Mapping[str, str] = {message: topic for topic, messages in _LINES.items() for message in messages}


def with_topic(text: str, topic: str | None) -> str:
    """A message of one line, followed by where help on it is."""
    return text if topic is None else f"{text} (help: {topic})"


class HelpfulFormatter(logging.Formatter):
    """Ends a log line with its topic."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  its name in `logging`
        return with_topic(super().formatMessage(record), topic_of(record))


def topic_of(record: logging.LogRecord) -> str | None:
    """Of the message, or else of the error of ours that it quotes."""
    topics = [TOPICS.get(str(record.msg)), *(_topic_of_error(each) for each in _values(record))]
    return next(filter(None, topics), None)


def topics() -> Iterable[str]:
    """Those that have an entry, in the page's order."""
    return _entries()


def entry(topic: str) -> str | None:
    """What the page has on a topic, as text for a terminal; `None` if it has nothing."""
    return _entries().get(topic)


def _entries() -> Mapping[str, str]:
    from importlib.resources import files

    text = files("aelastic.manual").joinpath("topics.md").read_text(encoding="utf-8")
    parts = [part.partition("\n") for part in text.split("\n# ")[1:]]
    return {topic: body.strip() for topic, _, body in parts}


def _values(record: logging.LogRecord) -> Iterable[object]:
    return record.args if isinstance(record.args, tuple) else ()


def _topic_of_error(value: object) -> str | None:
    topic = getattr(value, "topic", None) if isinstance(value, Exception) else None
    return topic if isinstance(topic, str) else None
