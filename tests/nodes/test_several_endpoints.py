"""Jobs with several endpoints: any minority of their hosts may fail, and a bad list is reported in one line."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Collection
from contextlib import suppress

import anyio
import pytest
from kit.agents import HASTY, Meeting, team_of
from kit.launching import Launcher
from kit.ports import quiet_port
from kit.servers.other_programs import answering
from kit.waiting import DEADLINE_S

from aelastic.base.host import proc_table
from aelastic.errors import EXIT_INPUT, InputError, RendezvousConnectionError, RendezvousStateError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores import c10d
from aelastic.rdzv.stores.quorum import QuorumStore

pytestmark = pytest.mark.usefixtures("warm_stores")

CONF = {"settle_time": 0.1, "last_call_timeout": 1}


def endpoints(count: int = 3) -> list[str]:
    port = quiet_port()
    return [f"127.0.0.{number}:{port}" for number in range(1, count + 1)]


@pytest.mark.parametrize("losses", [1, pytest.param(3, marks=pytest.mark.all)])
def test_a_job_begins_while_one_host_is_away_and_each_in_turn_dies_and_comes_back_empty(
    launch: Launcher, losses: int
) -> None:
    """After three losses none of the first three stores is left: each new one was initialized from the others."""
    names, other = endpoints(), f"127.0.0.9:{quiet_port()}"
    with team_of(launch, Meeting("c10d", ",".join(names)), "2:3", conf=CONF, wrapper=HASTY) as job:
        round_ = job.wait_round(job.start_many(2))
        for wrong in ([names[0], names[1], other], [names[0]]):  # agents with another list
            agent = job.start("--rdzv-endpoint", ",".join(wrong), "--rdzv-conf", "is_host=false")
            assert agent.wait() == EXIT_INPUT
            (line,) = [line for line in agent.stderr.splitlines() if line.startswith("aelastic: error: ")]
            expected = (
                f"this agent has the rendezvous endpoints {','.join(sorted(wrong))}, another agent of this run has "
            )
            assert f"{expected}{','.join(names)}: use the same list on every node" in line
            assert agent.stderr.count("the same list") == 1, "one line"
            assert not agent.starts
        third = job.start("--rdzv-endpoint", ",".join(reversed(names)))  # the same list
        round_ = job.wait_round([*job.live[:2], third], after=round_)
        for _ in range(losses):
            victim, *others = job.live
            victim.crash()
            round_ = job.wait_round(others, after=round_)
            round_ = job.wait_round([*others, job.start()], after=round_)
        assert round_.restart == 0
        job.finish(round_)


@pytest.mark.all
def test_static_ranks_stay_when_the_first_host_of_several_endpoints_dies(launch: Launcher) -> None:
    meeting = Meeting("static", ",".join(endpoints()))
    with team_of(launch, meeting, "3", conf=CONF) as job:
        agents = [job.start("--node-rank", str(rank)) for rank in range(3)]
        round_ = job.wait_round(agents)
        assert [agent.starts[-1].group_rank for agent in agents] == [0, 1, 2]
        agents[0].crash()
        agents[0] = job.start("--node-rank", "0")
        round_ = job.wait_round(agents, after=round_)
        assert [agent.starts[-1].group_rank for agent in agents] == [0, 1, 2]
        job.finish(round_)


# Bad lists.


@pytest.mark.all
async def test_an_endpoint_that_is_another_program_is_named() -> None:
    with answering(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        names = [f"127.0.0.1:{port}", *endpoints(2)]
        error = await error_of_store(names)
    assert isinstance(error, RendezvousStateError)
    assert f"{names[0]} is not a torch TCPStore" in str(error)


async def error_of_store(names: list[str]) -> Exception:
    store = QuorumStore(RendezvousSettings("c10d", ",".join(names), 3, 3), "job", os.environ)

    async def read() -> None:
        with anyio.fail_after(2 * DEADLINE_S):
            while True:
                with suppress(RendezvousConnectionError):
                    await store.get()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        with pytest.raises((InputError, RendezvousStateError)) as caught:
            await read()
        tasks.cancel_scope.cancel()
    await store.aclose()
    return caught.value


@pytest.mark.all
async def test_a_host_that_cannot_bind_its_endpoint_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(port: int, address: str = "") -> socket.socket:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), port, None, address)

    monkeypatch.setattr(c10d, "listen", refuse)
    names = ["127.0.0.1:80", "203.0.113.1:80", "203.0.113.2:80"]
    expected = f"the rendezvous endpoint {names[0]} cannot be served (Permission denied): choose another port"
    error = await error_of_store(names)
    assert isinstance(error, InputError) and str(error) == expected


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=[pytest.mark.all, pytest.mark.ci])]
)
async def test_endpoints_have_children_that_are_forked_from_one_process_and_do_without_it(signum: int) -> None:
    settings = RendezvousSettings("c10d", ",".join(endpoints()), 3, 3)
    stores = [QuorumStore(settings, "job", os.environ) for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for store in stores:
            tasks.start_soon(store.run)
        forked = await children_of(*stores)
        (template,) = {os.getsid(pid) for pid in forked}
        assert template not in forked
        os.kill(template, signum)
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
        assert not {template, *forked} & {os.getsid(pid) for pid in await children_of(*stores, before=forked)}
        tasks.cancel_scope.cancel()
    for store in stores:
        await store.aclose()
    assert not [pid for pid in (template, *forked) if proc_table.is_alive(pid)]


async def children_of(*stores: QuorumStore, before: Collection[int] = ()) -> list[int]:
    """The newest children, one per endpoint and none of those in `before`, once all stores can be read."""
    with anyio.fail_after(2 * DEADLINE_S):
        while True:
            for store in stores:
                with suppress(RendezvousConnectionError):
                    await store.get()
            found = [part._client._process.pid for part in stores[-1]._parts]
            pids = [pid for pid in found if pid and pid not in before]
            if len(pids) == len(stores[-1]._parts):
                return pids
            await anyio.sleep(0.05)
