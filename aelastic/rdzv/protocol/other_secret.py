"""A leader whose secret differs from this agent's, or that has none: is it worth waiting for them to agree?"""

from __future__ import annotations

from aelastic.errors import InputError
from aelastic.rdzv.protocol.handshake import OtherSecretError, ProofError, RefusedError
from aelastic.rdzv.protocol.writing import NotTrustedError

# While the secret of a job is changed, a node has the new file within this: a kubelet brings it in some 90 s.
SECRET_CHANGE_S = 120.0


class OtherSecret:
    """What is known of the leader that the cell names, and that no agent with this secret has written there.

    A record alone says nothing: it may be what an earlier job has left.  One whose leader lives, and has another
    secret or none, is of the job that is meant.
    """

    def __init__(self) -> None:
        self._token = ""  # of the leader that was greeted last
        self._since = 0.0
        self._distrust: ProofError | None = None  # what it said

    def is_new(self, token: str, now: float) -> bool:
        """Whether that leader has not been greeted yet; it is from now on."""
        if token == self._token:
            return False
        self._token, self._since, self._distrust = token, now, None
        return True

    def take(self, distrust: ProofError | None) -> None:
        """It has answered the greeting."""
        self._distrust = distrust

    def judge(self, error: NotTrustedError, where: str, now: float) -> NotTrustedError | InputError:
        """The error to raise for a read of the cell, given the greeting: an `InputError` if waiting cannot help."""
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
