"""Whether to wait for a leader whose secret differs from this agent's, or that has none."""

from __future__ import annotations

from aelastic.errors import InputError
from aelastic.rdzv.protocol.handshake import OtherSecretError, ProofError, RefusedError
from aelastic.rdzv.protocol.writing import NotTrustedError

# While a job's secret is being changed, each node gets the new file within this: a kubelet takes some 90 s.
SECRET_CHANGE_S = 120.0


class OtherSecret:
    """What is known of a leader that the cell names, if the cell was not written with this agent's secret.

    The record alone proves nothing: an earlier job may have left it.  If its leader lives, and has another secret or
    none, the record is of this job.
    """

    def __init__(self) -> None:
        self._token = ""  # of the leader that was greeted last
        self._since = 0.0
        self._distrust: ProofError | None = None  # why it was not trusted

    def is_new(self, token: str, now: float) -> bool:
        """Returns whether that leader has not been greeted yet, and notes that it now is."""
        if token == self._token:
            return False
        self._token, self._since, self._distrust = token, now, None
        return True

    def take(self, distrust: ProofError | None) -> None:
        """Notes the leader's answer to the greeting."""
        self._distrust = distrust

    def judge(self, error: NotTrustedError, where: str, now: float) -> NotTrustedError | InputError:
        """Returns the error to raise for a read of the cell, an `InputError` if waiting cannot help."""
        other = self._distrust
        if isinstance(other, RefusedError) and other.is_final:
            return InputError(f"{where}: its leader refused this agent: {other.reason}", topic="agents-do-not-match")
        if not isinstance(other, OtherSecretError):
            return error
        if not other.may_be_changed:
            return InputError(
                f"{where}: its agents have a different secret ({other.keys}): use the same --secret-file on every node",
                topic="agents-do-not-match",
            )
        waited_s = now - self._since
        if waited_s < SECRET_CHANGE_S:
            return NotTrustedError(
                f"{where}: its agents have a different secret ({other.keys}), which may be changing: waiting "
                f"up to {SECRET_CHANGE_S:g} s for this node to get it"
            )
        return InputError(
            f"{where}: its agents have had a different secret ({other.keys}) for {waited_s:.0f} s: use the same "
            "--secret-file on every node",
            topic="agents-do-not-match",
        )
