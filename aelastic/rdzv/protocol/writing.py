"""Which texts in a store were written by agents of this job.

With a secret, each text carries a proof (`rdzv/protocol/seals.py`).  A text without a valid one is ignored.  A leader
overwrites it at once; a candidate does so once it has not changed for a lease, because agents that were given another
secret by mistake may have written it, and their leader renews it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from aelastic.base.loop import clock
from aelastic.errors import InputError, RendezvousConnectionError
from aelastic.rdzv.protocol.codec import WireError, from_text
from aelastic.rdzv.protocol.keys import Key
from aelastic.rdzv.protocol.messages import LeaderAt, StoredCell
from aelastic.rdzv.protocol.seals import ForeignError, claimed, sign, verify
from aelastic.rdzv.protocol.secret_file import SecretFile

_log = logging.getLogger(__name__)

# A program that can write there may do so all the time.
WARN_INTERVAL_S = 60.0


class NotTrustedError(RendezvousConnectionError):
    """The text in the store was not written by an agent of this job.

    Attributes:
        leader: the leader that it names, if any.
    """

    topic = "the-record-has-another-secret"

    leader: LeaderAt | None = None


class Writing:
    """Signs what one agent writes, and verifies what it reads.

    Args:
        secret: the job's secret, if it has one.
        lease_s: as `RendezvousSettings.lease_s`.
    """

    def __init__(self, secret: SecretFile | None, lease_s: float) -> None:
        self._keys: Callable[[], Sequence[Key]] = (lambda: secret.keys) if secret is not None else tuple
        self.is_proved = secret is not None
        self._lease_s = lease_s
        self._foreign, self._since = b"", 0.0
        self._warned_at = -math.inf

    def sign(self, text: bytes) -> bytes:
        return sign(text, self._keys())

    def verify(self, text: bytes, where: str) -> bytes | None:
        """Returns the text if an agent of this job wrote it; `None` if it must be ignored.

        Raises:
            InputError: this agent has no secret, but those that wrote it do.
        """
        try:
            return verify(text, self._keys())
        except ForeignError as error:
            if not self._keys():
                raise InputError(f"{where}: {error}") from None
            now = clock.now()
            if text != self._foreign:
                self._foreign, self._since = text, now
            if now - self._warned_at >= WARN_INTERVAL_S:
                self._warned_at = now
                _log.warning(
                    "ignoring %s: %s; is --secret-file the same on every node?",
                    where,
                    error,
                    extra={"topic": "the-record-has-another-secret"},
                )
            return None

    def has_stood_still(self, text: bytes) -> bool:
        """Returns whether an ignored text has not changed for a lease."""
        return text == self._foreign and clock.now() - self._since >= self._lease_s

    def distrust(self, text: bytes, where: str) -> NotTrustedError:
        """Returns the error to raise for an ignored text that may be that of a living leader."""
        error = NotTrustedError(f"{where} was not written with this agent's secret")
        with suppress(WireError):
            stored = from_text(claimed(text).decode(errors="replace"))
            error.leader = stored.leader if isinstance(stored, StoredCell) else None
        return error
