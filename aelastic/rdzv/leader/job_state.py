"""The state of a job in its log: everything that a leader must know to continue the job."""

from __future__ import annotations

from base64 import b85decode, b85encode
from collections.abc import Sequence
from functools import lru_cache
from zlib import compress, decompressobj
from zlib import error as zlib_error

from aelastic.base.host.ports import is_address
from aelastic.base.record import Record
from aelastic.rdzv.ledger import Ledger
from aelastic.rdzv.log.entries import Entry, Payload
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.addresses import node_addresses, peer_addresses
from aelastic.rdzv.protocol.codec import WireError, record_from_text, record_to_text
from aelastic.rdzv.protocol.ranks import assign_ranks
from aelastic.rdzv.protocol.requests import Ask

# Enough for a job of thousands of nodes; no leader wrote a text that unpacks to more.
STATE_MAX = 8_000_000


class Participant(Record):
    """A node of a round.

    Args:
        name: its name in the log.
        address: where other nodes reach it.
        vote_port: where its agent receives requests for its vote; 0 if it has none.
        peer_address: where its connection comes from, if `address` is a host name, which may not resolve.
    """

    node_id: str
    name: str
    host: str
    role: str
    local_world_size: int
    address: str
    vote_port: int
    peer_address: str = ""


class Round(Record):
    """A round, with its nodes by group rank.

    Args:
        number: rises by one from round to round.
        term: the term of the leader that proposed it.
        leader_rank: the group rank of the leader's own node; -1 if it had none.
    """

    number: int
    term: int
    participants: tuple[Participant, ...]
    master_addr: str
    master_port: int
    leader_rank: int = -1

    @property
    def fence(self) -> int:
        return m.fence_of(self.term, self.number)

    @property
    def node_ids(self) -> list[str]:
        return [each.node_id for each in self.participants]

    def assigned(self, restart_count: int) -> dict[str, m.Assigned]:
        """Returns what each node is assigned, by node."""
        table = assign_ranks([(each.role, each.local_world_size) for each in self.participants])
        master = self.master_addr, self.master_port
        return {
            each.node_id: m.Assigned(self.number, restart_count, ranks, *master, term=self.term)
            for each, ranks in zip(self.participants, table, strict=True)
        }


class JobState(Record):
    """The content of an entry.

    Args:
        last_round: the last one that was agreed on; `None` if there was none yet.
        restart_count: restarts charged so far, including the one that began this round.
        ledger: what is remembered of earlier rounds, with ages.
        departed: group ranks that have finished the round and left it.
        asks: requests that were accepted but are not done, with the time that they have left.
        verdict: how the job ended; `None` while it runs.
    """

    last_round: Round | None = None
    restart_count: int = 0
    ledger: Ledger = Ledger()
    departed: tuple[int, ...] = ()
    asks: tuple[Ask, ...] = ()
    verdict: m.Ended | None = None


def round_of(number: int, term: int, nodes: Sequence[m.Node], leader: str) -> Round:
    """Returns a round of these nodes, in the order of their group ranks."""
    addresses, peers = node_addresses(nodes), peer_addresses(nodes)
    participants = [_participant(*each) for each in zip(nodes, addresses, peers, strict=True)]
    names = [node.node_id for node in nodes]
    rank = names.index(leader) if leader in names else -1
    return Round(number, term, tuple(participants), addresses[0], nodes[0].master_port, rank)


def _participant(node: m.Node, address: str, peer_address: str) -> Participant:
    also = "" if is_address(address) else peer_address
    return Participant(
        node.node_id,
        node.log_name or node.node_id,
        node.host,
        node.role,
        node.local_world_size,
        address,
        node.vote_port,
        also,
    )


def state_in(entry: Entry) -> JobState:
    """Returns the content of an entry.

    Raises:
        WireError: it has none.
    """
    return _unpacked(entry.payload)


@lru_cache(maxsize=8)  # the same few come again with each status
def _unpacked(payload: Payload) -> JobState:
    try:
        text = decompressobj().decompress(b85decode(payload), STATE_MAX).decode()
    except (ValueError, zlib_error) as error:
        raise WireError(f"an entry's payload is unreadable: {error}") from None
    return record_from_text(JobState, text)


def check_entries(message: m.Upward | m.Downward) -> None:
    """Checks the entries of a message, which a leader and each voter will read sooner or later.

    Raises:
        WireError: one of them has content that no leader wrote.
    """
    match message:
        case m.Hello(status=m.Status(log=log)) | m.Status(log=log) if log is not None:
            found = [log.committed, log.accepted and log.accepted.entry]
        case m.Plan(log=plan) if plan is not None:
            found = [plan.committed, plan.proposal, plan.accepted and plan.accepted.entry]
        case _:
            return
    for entry in found:
        if isinstance(entry, Entry) and entry.payload:
            state_in(entry)


def payload_of(state: JobState) -> Payload:
    """Returns the content of an entry for the wire, compressed because names repeat."""
    return Payload(b85encode(compress(record_to_text(state).encode())).decode())


def voters_in(entry: Entry) -> tuple[Participant, ...]:
    """Returns the nodes that decide on the entry after this one, and where to ask them."""
    return _voters(entry.payload, entry.voters) if entry.payload else ()


@lru_cache(maxsize=8)
def _voters(payload: Payload, names: tuple[str, ...]) -> tuple[Participant, ...]:
    round_ = _unpacked(payload).last_round
    participants = () if round_ is None else round_.participants
    return tuple(each for each in participants if each.name in names and each.vote_port)
