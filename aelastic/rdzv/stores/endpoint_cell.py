"""The endpoint's cell, as one agent reads and writes it: one text in a store, changed by compare-and-set.

With a secret, the text carries a proof.  A text that no agent of this job has written is ignored: a leader overwrites
it at once, any other agent once it has not changed for a lease, because it may be that of a living leader.
"""

from __future__ import annotations

import logging

from aelastic.base.loop import clock
from aelastic.errors import InputError, RendezvousStateError
from aelastic.rdzv.leader.job_state import state_in
from aelastic.rdzv.protocol.codec import OtherProtocolError, WireError, from_text, to_text
from aelastic.rdzv.protocol.messages import StoredCell
from aelastic.rdzv.protocol.secret_file import SecretFile
from aelastic.rdzv.protocol.sense import is_too_high
from aelastic.rdzv.protocol.writing import Writing
from aelastic.rdzv.stores.store import Store

_log = logging.getLogger(__name__)


class EndpointCell:
    """The cell of one run id.  At most one operation runs at a time.

    Args:
        store: keeps the text.
        secret: the job's secret, if it has one.
        lease_s: the job's lease.
    """

    def __init__(self, store: Store, secret: SecretFile | None, lease_s: float) -> None:
        self._store = store
        self._writing = Writing(secret, lease_s)
        self._text = b""  # as last read or written
        self.content: StoredCell | None = None  # the content of that text
        self._has_written = False

    async def run(self) -> None:
        """Runs until cancelled, or returns at once; operations wait for it."""
        await self._store.run()

    async def open(self) -> None:
        """Connects to the store, or serves it.  Called again after a failed operation."""
        await self._store.open()

    async def read(self) -> StoredCell | None:
        """Returns the content of the cell, or `None` if it is empty.

        Raises:
            NotTrustedError: it was written with another secret, and may be that of a living leader: it changed within a
                lease.
            InputError: an agent of another version wrote it.
            RendezvousConnectionError, RendezvousStateError, InputError: as `Store` does.
        """
        return self._take(await self._store.get())

    async def write(self, stored: StoredCell) -> StoredCell | None:
        """Replaces the cell if it is as last read or written; returns its content after that.

        Raises: as `read` does.
        """
        try:
            new = self._writing.sign(to_text(stored).encode())
        except WireError as error:
            raise RendezvousStateError(f"{self._store.where} cannot hold what is written there: {error}") from None
        text = await self._store.compare_set(self._text, new)
        if text != new:
            return self._take(text)
        self._text, self.content, self._has_written = text, stored, stored.cell.leader != ""
        return stored

    async def aclose(self) -> None:
        """Releases everything, including the store if this agent serves it."""
        await self._store.aclose()

    def _take(self, text: bytes) -> StoredCell | None:
        content = self._understood(text)
        self._text, self.content = text, content
        return content

    def _understood(self, text: bytes) -> StoredCell | None:
        if not text:
            return None
        verified = self._writing.verify(text, self._store.where)
        if verified is None:
            if self._has_written or self._writing.has_stood_still(text):
                return None
            raise self._writing.distrust(text, self._store.where)
        try:
            stored: StoredCell = from_text(verified.decode(errors="replace"))
            _check(stored)
            return stored
        except WireError as caught:
            error = caught
        if not self._has_written and isinstance(error, OtherProtocolError):
            raise InputError(f"{self._store.where}: {error}") from None
        if not self._has_written:
            raise RendezvousStateError(
                f"{self._store.where} was not written by an aelastic agent of this version ({error}): "
                "choose another run id, or another endpoint"
            ) from None
        _log.warning(
            "%s: another program wrote over the record of this leader: registering it again",
            self._store.where,
            extra={"topic": "the-store-was-restarted"},
        )
        return None

    @property
    def name(self) -> str:
        """Back end and endpoint, for messages: `c10d at node0:29400`."""
        return self._store.name

    @property
    def own_address(self) -> str:
        """This agent's address on its connection to the store, which other nodes may use; empty if unknown."""
        return self._store.own_address

    @property
    def endpoint_host(self) -> str:
        """The host of the store, as the user wrote it, if it is this machine; otherwise empty."""
        return self._store.endpoint_host

    @property
    def is_served_here(self) -> bool:
        """Whether the cell is lost when this agent ends."""
        return self._store.is_served_here


def _check(stored: StoredCell) -> None:
    """Checks the content of the cell, which a later leader reads.

    Raises:
        WireError: no leader has written it.
    """
    cell = stored.cell
    accepted = None if cell.accepted is None else cell.accepted.entry
    terms = [cell.term, 0 if cell.accepted is None else cell.accepted.term]
    for entry in (cell.committed, accepted):
        if entry is not None:
            terms.append(entry.term)
        if entry is not None and entry.payload:
            state_in(entry)
    if is_too_high(max(terms), clock.wall_ms()):
        raise WireError(f"term {max(terms)} is none that a log has counted to")
