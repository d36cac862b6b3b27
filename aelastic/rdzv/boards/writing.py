"""What agents of one job write on a board, and what others have written there.

With a secret each text is proved (`rdzv/secret/seals.py`).  What is not counts as nothing: a coordinator writes over it
at once, a candidate once it has stood unchanged for a lease, since it may be the record of agents that were given
another secret by mistake, and whose coordinator renews it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from aelastic import aio
from aelastic.errors import InputError, RendezvousConnectionError
from aelastic.rdzv.board import Candidate, LeaderRecord
from aelastic.rdzv.secret.keys import Key
from aelastic.rdzv.secret.seals import ForeignError, claimed, sign, verify
from aelastic.rdzv.secret.secret_file import SecretFile

_log = logging.getLogger(__name__)

# Whoever can write there may do so all the time.
TELL_INTERVAL_S = 60.0


class NotTrustedError(RendezvousConnectionError):
    """What is on the board counts as nothing.

    Attributes:
        candidate: that it names, if any.
    """

    topic = "the-record-has-another-secret"

    candidate: Candidate | None = None


class Writing:
    """The words of one agent's board.

    Args:
        secret: of the job, if it has one.
        lease_s: as `RendezvousSettings.lease_s`.
    """

    def __init__(self, secret: SecretFile | None, lease_s: float) -> None:
        self._keys: Callable[[], Sequence[Key]] = (lambda: secret.keys) if secret is not None else tuple
        self.is_proved = secret is not None
        self._lease_s = lease_s
        self._foreign, self._since = b"", 0.0
        self._told_at = -math.inf

    def sign(self, text: bytes) -> bytes:
        return sign(text, self._keys())

    def verify(self, text: bytes, where: str) -> bytes | None:
        """The text that an agent of this job wrote; `None` where it counts as nothing.

        Raises:
            InputError: this agent has no secret, and those that wrote it do.
        """
        try:
            return verify(text, self._keys())
        except ForeignError as error:
            if not self._keys():
                raise InputError(f"{where}: {error}") from None
            now = aio.now()
            if text != self._foreign:
                self._foreign, self._since = text, now
            if now - self._told_at >= TELL_INTERVAL_S:
                self._told_at = now
                _log.warning(
                    "ignoring %s: %s; is --secret-file the same on every node?",
                    where,
                    error,
                    extra={"topic": "the-record-has-another-secret"},
                )
            return None

    def stand_by(self, text: bytes, where: str, read: Callable[[bytes], LeaderRecord | None]) -> None:
        """Leaves a text that counts as nothing alone for a lease.

        Raises:
            NotTrustedError: it has not stood for so long.
        """
        if text == self._foreign and aio.now() - self._since < self._lease_s:
            error = NotTrustedError(f"{where} was not written with this agent's secret")
            with suppress(ValueError):
                error.candidate = record.candidate if (record := read(claimed(text))) else None
            raise error
