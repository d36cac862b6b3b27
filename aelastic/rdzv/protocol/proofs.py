"""The handshakes of an agent's connections; a job without a secret has none."""

from __future__ import annotations

import logging
import os

from aelastic.base.host.ports import is_loopback
from aelastic.rdzv.protocol.addresses import plain_address
from aelastic.rdzv.protocol.codec import PROTOCOL
from aelastic.rdzv.protocol.handshake import NONCE_BYTES, Handshake
from aelastic.rdzv.protocol.secret_file import SecretFile

_log = logging.getLogger(__name__)

# The purpose of a connection: a proof for one port is not valid at another.
MEMBER, CAMPAIGN = "member", "campaign"
OPEN = (
    "agents talk over %s without a secret: anyone who reaches this port can join, restart or end the job, and read its "
    "state; use --secret-file"
)


class Proofs:
    """Makes the handshakes of one agent.

    Args:
        secret: the job's, if it has one.
    """

    def __init__(self, secret: SecretFile | None) -> None:
        self._secret = secret
        self._has_warned = False

    def make(self, purpose: str, *, is_client: bool) -> Handshake | None:
        """Returns the handshake of a new connection; `None` if the job has no secret."""
        if (secret := self._secret) is None:
            return None
        nonce, source = os.urandom(NONCE_BYTES), secret.path
        return Handshake(secret.keys, PROTOCOL, purpose, nonce, is_client=is_client, source=source)

    def warn_if_open(self, peer: str) -> None:
        """Warns once if this agent talks to another host without a secret."""
        if self._secret is None and not self._has_warned and peer and not is_loopback(plain_address(peer)):
            self._has_warned = True
            _log.warning(OPEN, plain_address(peer), extra={"topic": "the-job-has-no-secret"})
