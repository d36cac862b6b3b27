"""Checks of who can get in: the job's secret, who has it, where agents listen, and what no secret protects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from aelastic.base.host import names
from aelastic.base.host.ports import is_loopback
from aelastic.cli.doctor.finding import Finding
from aelastic.rdzv.protocol.codec import WireError, from_text
from aelastic.rdzv.protocol.handshake import UNPROVED_BYTES_MAX, ProofError
from aelastic.rdzv.protocol.keys import shown
from aelastic.rdzv.protocol.listening import outward_addresses
from aelastic.rdzv.protocol.messages import LeaderAt, StoredCell
from aelastic.rdzv.protocol.proofs import MEMBER, Proofs
from aelastic.rdzv.protocol.seals import ForeignError, claimed, verify
from aelastic.rdzv.protocol.secret_file import SecretFile
from aelastic.rdzv.protocol.stream import PROOF_TIMEOUT_S
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.endpoints import Endpoint

_PAGE = "docs/how-to/secret.md"


def secret_of(settings: RendezvousSettings, run_id: str) -> SecretFile | None:
    """Returns the job's secret, which its settings have checked."""
    return None if settings.secret_path is None else SecretFile(settings.secret_path, run_id)


async def check_access(settings: RendezvousSettings, run_id: str, text: bytes) -> AsyncIterator[Finding]:
    """Yields findings for a job with several nodes.

    Args:
        text: the run's record in the store; empty without one.
    """
    secret = secret_of(settings, run_id)
    if secret is None:
        yield Finding(
            "warning", "secret", "none: anyone who reaches an agent's port can join or end the job and read its state: "
            f"use the same --secret-file on every node ({_PAGE})",
        )  # fmt: skip
    else:
        first, *more = [shown([key.id]) for key in secret.keys]
        words = f"key {first} of {secret.path} is used" + "".join(f", {key} is also accepted" for key in more)
        yield Finding("ok", "secret", words)
    if text:
        yield await _check_coordinator(text, secret)
    addresses = [settings.local_addr] if settings.local_addr else outward_addresses() or ["localhost"]
    where = ", ".join(addresses)
    words = f"the agent listens at {where} and loopback, or at the address from which it reaches the endpoint"
    words += "; the workers' store at MASTER_ADDR"
    everywhere = "the agent and the workers' store listen at all addresses (--bind-all)"
    yield Finding("ok", "listening", everywhere if settings.bind_all else words)
    if all(map(is_loopback, addresses)) and not settings.bind_all:
        yield Finding("ok", "firewall", "not needed: other hosts cannot reach any port of the job")
    else:
        yield Finding(
            "warning", "firewall",
            f"needed: the workers' store, gloo and NCCL accept anyone who reaches {where}: "
            f"let only the job's nodes through ({_PAGE})",
        )  # fmt: skip


async def _check_coordinator(text: bytes, secret: SecretFile | None) -> Finding:
    keys = secret.keys if secret is not None else ()
    try:
        verify(text, keys)
    except ForeignError as error:
        problem = f"the record of this run at the endpoint is ignored here: {error}"
    else:
        problem = ""
    leader = None
    with suppress(WireError):
        stored = from_text(claimed(text).decode(errors="replace"))
        leader = stored.leader if isinstance(stored, StoredCell) else None
    if leader is not None and secret is not None:
        is_trusted, outcome = await _greet(leader, secret)
        problem = problem or ("" if is_trusted else outcome)
        words = f"{Endpoint(next(iter(leader.addresses), ''), leader.port)}: {problem or outcome}"
    else:
        words = problem or "nothing is proved"
    return Finding("error" if problem else "ok", "leader", words)


async def _greet(leader: LeaderAt, secret: SecretFile) -> tuple[bool, str]:
    """Returns whether a leader is trusted, and which keys it has, or why not."""
    proof = Proofs(secret).make(MEMBER, is_client=True)
    assert proof is not None
    for address in leader.addresses:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                reader, writer = await names.connect(
                    address, PROOF_TIMEOUT_S, lambda host: asyncio.open_connection(host, leader.port)
                )
                try:
                    writer.write(proof.begin())
                    while proof.tags is None and (data := await reader.read(UNPROVED_BYTES_MAX)):
                        writer.write(proof.feed(data))
                except ProofError as error:
                    return False, str(error)
                finally:
                    writer.close()
                return True, f"it has key {shown(proof.other_keys)}"
    return False, "it cannot be reached: is its host up and the port open?"
