"""Failures that a job is promised to survive: lost hosts, leaders and endpoints, one at a time or together.

`benchmarks/many_nodes.py` measures how long each fault takes; `test_chaos.py` has other faults.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kit.agents import (
    COORDINATES,
    FAIL,
    FAIL_CODE,
    IS_SPARE,
    LATE,
    LONG_LEASE_S,
    TEAM_LEASE_S,
    WORKER,
    Agent,
    Meeting,
    Round,
    Team,
    team_of,
    unread_bytes,
)
from kit.faults import netns
from kit.faults.chaos import LEASE_S as CHAOS_LEASE_S
from kit.faults.chaos import Battlefield, Undo, battlefield, serve_endpoint
from kit.faults.netns import Net, Node
from kit.launching import Launcher, alive
from kit.verbs import Output, verb
from kit.waiting import DEADLINE_S, wait_for

from aelastic.base.host import control_sockets
from aelastic.errors import EXIT_TRY_AGAIN

pytestmark = pytest.mark.timeout(300)

PORT = 29400
ALL = (0, 1, 2)
# On a busy machine a node needs more than 0.3 s to find the next leader, and a missing node explains a failure.
PATIENT = """
from aelastic.rdzv.leader import coordinator

coordinator.GRACE_S = 10.0
"""
# A worker that does not fail when it loses another one.
DEAF = WORKER.replace("begin_talk()\nrest()", "rest()")
# For tests in which something stays away for more than two leases.
LEASE_S = 2.0
LONG_S = 2 * LEASE_S + 1


@pytest.fixture
def net() -> Iterator[Net]:
    with netns.opened() as net:
        yield net


@contextmanager
def team_on(
    launch: Launcher, endpoint: str, nnodes: str, *, lease_s: float = LONG_LEASE_S, **more: Any
) -> Iterator[Team]:
    """The agents of one job, each on a node of its own."""
    conf = {"last_call_timeout": 1, "settle_time": 0.1, "lease": lease_s}
    with team_of(launch, Meeting("c10d", endpoint), nnodes, conf=conf, **more) as team:
        yield team


def endpoint_of(node: Node) -> str:
    return f"{node.v4()}:{PORT}"


def start_in_order(team: Team, nodes: Sequence[Node]) -> list[Agent]:
    """Starts the agents in order; the first one leads."""
    first = team.start(prefix=nodes[0].prefix)
    first.wait_logged(COORDINATES)
    return [first, *(team.start(prefix=node.prefix) for node in nodes[1:])]


def kill_host(agent: Agent) -> Undo:
    """Kills an agent, its helpers, the store that it serves, and its workers; the kernel notifies the others."""
    agent.stop()  # it must not see the others end
    for pid in agent.left():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()
    for name in os.listdir(agent.tmp):
        shutil.rmtree(agent.tmp / name)  # no helper is left to do so
    return lambda: None


def cut_power(net: Net, node: Node, agent: Agent) -> Undo:
    """Kills the same processes without notice to anyone; returns what reconnects the node."""
    plug_in = net.pull_out(node)
    kill_host(agent)
    return plug_in


# The host of the endpoint and the leader.


def test_of_two_nodes_one_continues_alone_once_every_process_of_the_other_host_is_killed(
    net: Net, launch: Launcher
) -> None:
    nodes = [net.node(f"node{number}") for number in range(2)]
    with team_on(launch, endpoint_of(nodes[0]), "1:2") as team:
        first, second = start_in_order(team, nodes)
        both = team.wait_round([first, second])
        kill_host(first)
        alone = team.wait_round([second], after=both)
        assert second.has_logged(COORDINATES), team.story
        again = team.start(prefix=nodes[0].prefix)
        last = team.wait_round([again, second], after=alone)
        assert (alone.restart, last.restart) == (0, 0)
        team.finish(last)


@pytest.mark.all
@pytest.mark.ci
def test_of_two_nodes_one_waits_while_the_other_host_is_without_power(net: Net, launch: Launcher) -> None:
    nodes = [net.node(f"node{number}") for number in range(2)]
    with team_on(launch, endpoint_of(nodes[0]), "1:2", lease_s=LEASE_S) as team:
        first, second = start_in_order(team, nodes)
        both = team.wait_round([first, second])
        plug_in = cut_power(net, nodes[0], first)
        wait_for("its worker is stopped", lambda: not alive(second.starts[-1].pid))
        second.wait_logged("looking for the leader .*: there is no quorum")
        assert len(second.starts) == 1 and not second.has_logged(COORDINATES), team.story
        plug_in()
        last = team.wait_round([team.start(prefix=nodes[0].prefix), second], after=both)
        assert last.restart == 0
        team.finish(last)


@pytest.mark.parametrize("is_cut", [False, pytest.param(True, marks=pytest.mark.all)], ids=["killed", "cut"])
def test_of_three_nodes_two_continue_without_the_host_of_the_endpoint_and_the_leader(
    net: Net, launch: Launcher, is_cut: bool
) -> None:
    nodes = [net.node(f"node{number}") for number in range(3)]
    with team_on(launch, endpoint_of(nodes[0]), "1:3", lease_s=LEASE_S if is_cut else LONG_LEASE_S) as team:
        first, *others = start_in_order(team, nodes)
        three = team.wait_round([first, *others])
        plug_in = cut_power(net, nodes[0], first) if is_cut else kill_host(first)
        two = team.wait_round(others, after=three)
        assert sum(agent.has_logged(COORDINATES) for agent in others) == 1, team.story
        two.send_signal(FAIL, 0)
        again = team.wait_round(others, after=two)
        assert (two.restart, again.restart) == (0, 1)
        plug_in()
        last = team.wait_round([*others, team.start(prefix=nodes[0].prefix)], after=again)
        assert last.restart == 1
        team.finish(last)


# The endpoint, while another host leads.


@pytest.mark.all
@pytest.mark.ci
def test_workers_are_not_touched_while_nobody_reaches_the_endpoint_and_a_failure_restarts_them(
    net: Net, launch: Launcher
) -> None:
    endpoint = net.node("endpoint")
    nodes = [net.node(f"node{number}") for number in range(3)]
    with team_on(launch, serve_endpoint(net, endpoint), "3", lease_s=LEASE_S) as team:
        agents = start_in_order(team, nodes)
        round_ = team.wait_round(agents)
        undo = net.isolate(endpoint, nodes)
        time.sleep(LONG_S)
        team.assert_untouched(round_)
        round_.send_signal(FAIL, 1)
        again = team.wait_round(agents, after=round_)
        assert again.restart == 1
        undo()
        team.assert_untouched(again)
        assert sum(agent.has_logged(COORDINATES) for agent in agents) == 1, team.story
        team.finish(again)


# Agents that are restarted.


@pytest.mark.all
@pytest.mark.parametrize(
    "order",
    [pytest.param((0, 1, 2), marks=pytest.mark.ci), (2, 1, 0), (1, 0, 2)],
    ids=lambda order: "".join(map(str, order)),
)
def test_agents_are_restarted_one_after_the_other_in_any_order(
    net: Net, launch: Launcher, order: Sequence[int]
) -> None:
    """The first one serves the endpoint."""
    nodes = [net.node(f"node{number}") for number in range(3)]
    with team_on(launch, endpoint_of(nodes[0]), "2:3") as team:
        agents = start_in_order(team, nodes)
        round_ = team.wait_round(agents)
        round_.send_signal(FAIL, 0)
        round_ = team.wait_round(agents, after=round_)
        for number in order:
            agents[number].crash()
            round_ = team.wait_round([agent for agent in agents if not agent.is_over], after=round_)
            agents[number] = team.start(prefix=nodes[number].prefix)
            round_ = team.wait_round(agents, after=round_)
            assert round_.restart == 1, "the job remembers that one was charged"
        team.finish(round_)


def is_up(agent: Agent) -> bool:
    return bool(control_sockets.names_in(control_sockets.folder_of({"XDG_RUNTIME_DIR": str(agent.folder)})))


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("is_remembered", [True, False], ids=["remembered", "forgotten"])
def test_all_agents_are_killed_and_come_back_in_any_order(net: Net, launch: Launcher, is_remembered: bool) -> None:
    """The endpoint remembers the job if no agent serves it."""
    nodes = [net.node(f"node{number}") for number in range(3)]
    endpoint = serve_endpoint(net, net.node("endpoint")) if is_remembered else endpoint_of(nodes[0])
    with team_on(launch, endpoint, "3", lease_s=LEASE_S) as team:
        agents = start_in_order(team, nodes)
        round_ = team.wait_round(agents)
        for order in (2, 1, 0), (1, 0, 2), (0, 2, 1):
            round_.send_signal(FAIL, 0)
            round_ = team.wait_round(agents, after=round_)
            restarts = round_.restart
            for agent in agents:
                agent.stop()
            for agent in agents:
                kill_host(agent)
            for number in order:
                agents[number] = team.start(prefix=nodes[number].prefix)
                wait_for("the agent is up", lambda agent=agents[number]: is_up(agent))  # type: ignore[misc]
            round_ = team.wait_round(agents, after=round_)
            assert round_.restart == (restarts if is_remembered else 0), team.story
        team.finish(round_)


# Lossy networks.


@pytest.mark.all
@pytest.mark.parametrize("endpoint, percent", [("c10d", 30), ("c10d on three", 50)])
def test_no_two_rounds_run_side_by_side_over_a_network_that_loses(
    launch: Launcher, tmp_path: Path, endpoint: str, percent: int
) -> None:
    with battlefield(launch, endpoint, tmp_path, STAR_SOLO="1") as there:
        fence = there.fence
        undo = there.all_leaky(0, percent=percent)
        connect = there.cut_off(there.coordinator)
        time.sleep(4 * CHAOS_LEASE_S)
        connect()
        undo()
        there.wait_progress(ALL, time.monotonic(), above=fence)
        assert there.restart == 0, there.team.story
        there.assert_not_side_by_side()


@pytest.mark.all
@pytest.mark.ci
def test_three_endpoints_carry_an_election_over_a_network_that_loses_28_percent(
    launch: Launcher, tmp_path: Path
) -> None:
    with battlefield(launch, "c10d on three", tmp_path, STAR_SOLO="1") as there:
        leader, fence = there.coordinator, there.fence
        undo = there.all_leaky(0, percent=28)
        since, come_back = time.monotonic(), there.agent_killed(leader)
        there.wait_progress(there.others(leader), since, above=fence)
        undo()
        come_back()
        there.wait_progress(ALL, time.monotonic(), above=fence)
        assert there.restart == 0, there.team.story
        there.assert_not_side_by_side()


@pytest.mark.all
def test_a_node_that_loses_packets_and_then_all_stops_its_workers_while_the_others_continue(
    launch: Launcher, tmp_path: Path
) -> None:
    with battlefield(launch, "c10d apart", tmp_path, STAR_SOLO="1") as there:
        undo = there.all_leaky(0, percent=30)
        assert_left_behind(there, there.cut_off)
        undo()


@pytest.mark.all
@pytest.mark.parametrize(
    "fault", [Battlefield.cut_off, Battlefield.deaf, Battlefield.mute], ids=["both ways", "inbound", "outbound"]
)
def test_a_node_that_is_cut_off_stops_its_workers_while_the_others_continue(
    launch: Launcher, tmp_path: Path, fault: Callable[[Battlefield, int], Undo]
) -> None:
    with battlefield(launch, "c10d apart", tmp_path, STAR_SOLO="1") as there:
        assert_left_behind(there, lambda index: fault(there, index))


def assert_left_behind(there: Battlefield, cut: Callable[[int], Undo]) -> None:
    """The others continue without a node, which stops its workers and joins again once the cut is over.

    Its workers need no peer, so only its agent stops them.
    """
    node = there.others(there.coordinator)[0]
    worker, fence, began = there.agents[node].starts[-1].pid, there.fence, time.monotonic()
    undo = cut(node)
    there.wait_progress(there.others(node), began, above=fence)
    wait_for("its worker is stopped", lambda: not alive(worker))
    undo()
    there.wait_progress(ALL, time.monotonic(), above=there.fence)
    assert there.restart == 0, there.team.story
    there.assert_not_side_by_side()


# Loss of most stores.


def most_are_silent(there: Battlefield) -> Undo:
    """Two of three stores don't answer other hosts until the effect is undone."""
    if not there.etcds:
        return there.endpoints_silent()
    silent = there.etcds[:2]
    for server in silent:
        server.stop()

    def undo() -> None:
        for server in silent:
            server.cont()

    return undo


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("endpoint", ["three etcds", "c10d on three"])
def test_workers_are_not_touched_while_most_stores_are_silent_and_a_failure_waits_for_them(
    launch: Launcher, tmp_path: Path, endpoint: str
) -> None:
    with battlefield(launch, endpoint, tmp_path) as there:
        there.wait_progress(ALL, time.monotonic() + CHAOS_LEASE_S)
        fence, since = there.fence, time.monotonic()
        undo = most_are_silent(there)
        there.wait_progress(ALL, since + 2 * CHAOS_LEASE_S + 1)
        assert there.fence == fence, "no worker has noticed"
        there.worker_raises(0)
        wait_for("the failure is known", lambda: there.agents[0].has_logged("rank . failed"))
        time.sleep(1.0)
        assert all(len(agent.starts) == 1 for agent in there.agents), there.team.story
        undo()
        there.wait_progress(ALL, time.monotonic(), above=fence)
        assert there.restart == 1, there.team.story
        there.assert_not_side_by_side()


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("endpoint", ["three etcds", "c10d on three"])
def test_a_job_that_fails_while_most_stores_are_silent_ends_on_all_nodes_once_they_are_back(
    launch: Launcher, tmp_path: Path, endpoint: str
) -> None:
    with battlefield(launch, endpoint, tmp_path, max_restarts=0) as there:
        undo = most_are_silent(there)
        there.worker_raises(0)
        wait_for("the failure is known", lambda: there.agents[0].has_logged("rank . failed"))
        time.sleep(1.0)
        assert not any(agent.is_over for agent in there.agents), there.team.story
        undo()
        assert_failed(there.team, there.agents)


# Decisions while a leader is lost.


def assert_failed(team: Team, agents: Sequence[Agent]) -> None:
    """All end with one verdict: the exit code and the rank of the same failure."""
    assert [agent.wait() for agent in agents] == [FAIL_CODE] * len(agents), team.story
    causes = {rank for agent in agents for rank in re.findall(r"Root Cause[^=]*\n *rank +: (\d+) ", agent.stderr)}
    named = [agent for agent in agents if "Root Cause" in agent.stderr]
    assert len(causes) == 1 and named == list(agents), team.story


# More bytes than heartbeats take while a leader is frozen (16 each).  A status with a failure takes over 1,000.
SMALL_MESSAGES = 350


@dataclass
class Trio:
    """Two working nodes; a spare leads, so that its loss does not end a round.

    Args:
        endpoint: where the endpoint is.
        nodes: the leader's, and the two working ones.
        agents: their agents.
    """

    net: Net
    team: Team
    endpoint: Node
    nodes: list[Node]
    agents: list[Agent]
    round: Round

    @property
    def leader(self) -> Agent:
        return self.agents[0]

    @property
    def at_work(self) -> list[Agent]:
        return self.agents[1:]

    @property
    def failing(self) -> Agent:
        """The agent whose worker will fail."""
        return self.agents[1]

    def fail(self) -> None:
        os.kill(self.failing.starts[-1].pid, FAIL)

    def wait_failed(self) -> None:
        """Waits until its agent knows of the failure."""
        self.failing.wait_logged("rank . failed on")

    def wait_failure_sent(self) -> None:
        """Waits until the frozen leader's host has received the status with the failure; the leader reads it later."""
        leader, address = self.leader.pid, self.nodes[self.agents.index(self.failing)].v4()
        wait_for("the failure is sent", lambda: unread_bytes(leader, address) > SMALL_MESSAGES)

    def isolate(self, index: int) -> Undo:
        return self.net.isolate(self.nodes[index], [self.endpoint, *self.nodes[:index], *self.nodes[index + 1 :]])

    def freeze(self, index: int) -> Undo:
        agent = self.agents[index]
        agent.stop()
        return lambda: agent.signal(signal.SIGCONT)


@contextmanager
def trio(
    net: Net,
    launch: Launcher,
    *,
    lease_s: float = LEASE_S,
    serves: bool = False,
    nnodes: str = "2",
    worker: str = DEAF,
    leader_wrapper: str = "",
    **more: Any,
) -> Iterator[Trio]:
    """Starts the three nodes.

    Args:
        lease_s: the leader's.
        serves: whether the leader's host also has the endpoint.
        nnodes: two at most.
        worker: script of the two nodes.
        leader_wrapper: Python code that runs in the leader's agent.
        more: see `Team`.
    """
    nodes = [net.node(f"node{number}") for number in range(3)]
    served_by = nodes[0] if serves else net.node("endpoint")
    endpoint = endpoint_of(served_by) if serves else serve_endpoint(net, served_by)
    with team_on(launch, endpoint, nnodes, lease_s=lease_s, worker=worker, wrapper=PATIENT, **more) as team:
        leader = team.start(prefix=nodes[0].prefix, wrapper=LATE + leader_wrapper)
        leader.wait_logged(COORDINATES)
        at_work = [team.start(prefix=node.prefix) for node in nodes[1:]]
        round_ = team.wait_round(at_work)
        leader.go()
        leader.wait_logged(IS_SPARE)
        yield Trio(net, team, served_by, nodes, [leader, *at_work], round_)


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("is_cut", [False, True], ids=["killed", "cut"])
def test_workers_are_not_touched_when_a_spare_is_lost_with_the_endpoint_whether_it_leads_or_not(
    net: Net, launch: Launcher, is_cut: bool
) -> None:
    with trio(net, launch, serves=True) as there:
        spare = there.leader
        for _ in range(2):
            plug_in = cut_power(net, there.nodes[0], spare) if is_cut else kill_host(spare)
            time.sleep(LONG_S)
            there.team.assert_untouched(there.round)
            assert there.team.coordinator in there.at_work, there.team.story
            plug_in()
            spare = there.team.start(prefix=there.nodes[0].prefix)
            spare.wait_logged(IS_SPARE)
        kill_host(spare)
        there.fail()
        again = there.team.wait_round(there.at_work, after=there.round)
        assert again.restart == 1
        there.team.finish(again)


NO_RESTARTS = ("--max-restarts", "0")


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("serves", [False, True], ids=["alone", "with the endpoint"])
def test_a_job_that_fails_as_its_leader_is_killed_ends_with_one_verdict(
    net: Net, launch: Launcher, serves: bool
) -> None:
    """With the endpoint it takes half a lease: the node whose last status was not read gets a connection reset."""
    with trio(net, launch, lease_s=LEASE_S if serves else LONG_LEASE_S, serves=serves, options=NO_RESTARTS) as there:
        there.leader.stop()
        there.fail()
        there.wait_failed()
        kill_host(there.leader)
        assert_failed(there.team, there.at_work)


# A leader that dies once a quorum has accepted the verdict, but before it tells anyone.
ENDS_AT_VERDICT = """
import os
import signal

from aelastic.rdzv.log import leader as leading

commit = leading.commit


def commit_and_end(leader):
    committed = commit(leader)
    if committed is not None and committed.node.committed.is_verdict:
        os.kill(os.getpid(), signal.SIGKILL)
    return committed


leading.commit = commit_and_end
"""


@pytest.mark.all
@pytest.mark.ci
def test_a_verdict_that_nobody_received_is_that_of_the_next_leader_though_the_node_that_failed_is_lost(
    net: Net, launch: Launcher
) -> None:
    """The remaining node could run alone, and has never read of the failure."""
    with trio(
        net, launch, lease_s=TEAM_LEASE_S, nnodes="1:2", options=NO_RESTARTS, leader_wrapper=ENDS_AT_VERDICT
    ) as there:
        left = there.agents[2]
        there.leader.stop()
        there.fail()
        there.wait_failure_sent()
        there.freeze(1)  # the remaining node and the endpoint accept the verdict
        there.leader.signal(signal.SIGCONT)
        assert there.leader.wait() == -signal.SIGKILL
        kill_host(there.failing)
        assert_failed(there.team, [left])
        assert len(left.starts) == 1, there.team.story


@pytest.mark.all
@pytest.mark.ci
def test_the_only_node_that_has_missed_the_verdict_reads_it_at_the_endpoint(net: Net, launch: Launcher) -> None:
    """It could run alone, and no living agent knows the verdict."""
    with trio(net, launch, lease_s=LONG_LEASE_S, nnodes="1:2", options=NO_RESTARTS) as there:
        wake = there.freeze(2)
        there.fail()
        assert_failed(there.team, [there.failing])
        kill_host(there.leader)
        wake()
        assert_failed(there.team, there.at_work)
        assert len(there.agents[2].starts) == 1, there.team.story


def killed_before_it_votes(there: Trio) -> None:
    """One of two voters has accepted the verdict, and the endpoint is silent."""
    undo = there.net.isolate(there.endpoint, there.nodes)
    there.freeze(2)
    there.fail()
    there.wait_failed()
    time.sleep(1.0)  # killed earlier, it would explain the failure
    kill_host(there.agents[2])
    assert not any(agent.is_over for agent in there.agents[:2]), there.team.story
    undo()


def killed_before_it_reads_the_verdict(there: Trio) -> None:
    there.freeze(2)
    there.fail()
    there.failing.wait()
    kill_host(there.agents[2])


@pytest.mark.all
@pytest.mark.parametrize("lose", [killed_before_it_votes, killed_before_it_reads_the_verdict])
def test_a_job_that_fails_as_another_node_is_killed_ends_with_one_verdict(
    net: Net, launch: Launcher, lose: Callable[[Trio], None]
) -> None:
    with trio(net, launch, lease_s=TEAM_LEASE_S / 2, options=NO_RESTARTS) as there:
        lose(there)
        assert_failed(there.team, there.agents[:2])


@pytest.mark.all
def test_a_job_that_fails_over_a_network_that_loses_packets_ends_with_one_verdict(
    launch: Launcher, tmp_path: Path
) -> None:
    with battlefield(launch, "c10d apart", tmp_path, max_restarts=0) as there:
        there.all_leaky(0, percent=30)
        there.worker_raises(0)
        assert_failed(there.team, there.agents)


@pytest.mark.all
@pytest.mark.parametrize("index", [0, 2], ids=["leader", "node"])
@pytest.mark.parametrize("fault", [Trio.freeze, Trio.isolate], ids=["frozen", "cut"])
def test_an_agent_that_misses_the_end_of_a_job_reads_the_same_verdict_when_it_is_back(
    net: Net, launch: Launcher, fault: Callable[[Trio, int], Undo], index: int
) -> None:
    with trio(net, launch, options=NO_RESTARTS) as there:
        undo = fault(there, index)
        there.fail()
        others = [agent for agent in there.agents if agent is not there.agents[index]]
        assert_failed(there.team, others)
        undo()
        assert_failed(there.team, there.agents)


@pytest.mark.all
def test_a_job_that_fails_while_nobody_reaches_the_endpoint_ends_with_one_verdict(net: Net, launch: Launcher) -> None:
    with trio(net, launch, options=NO_RESTARTS) as there:
        net.isolate(there.endpoint, there.nodes)
        there.fail()
        assert_failed(there.team, there.agents)


def killed_before_it_reads(there: Trio) -> None:
    there.leader.stop()
    there.fail()
    there.wait_failed()
    kill_host(there.leader)


def killed_once_it_has_decided(there: Trio) -> None:
    there.fail()
    wait_for("a node knows", lambda: any(agent.has_logged("restart 1 of 3") for agent in there.at_work))
    kill_host(there.leader)


def killed_as_workers_start(there: Trio) -> None:
    there.fail()
    wait_for("a worker starts", lambda: any(len(agent.starts) == 2 for agent in there.at_work))
    kill_host(there.leader)


def frozen_before_it_reads(there: Trio) -> None:
    there.leader.stop()
    there.fail()
    wait_for("another leads", lambda: any(agent.has_logged(COORDINATES) for agent in there.at_work))
    there.leader.signal(signal.SIGCONT)


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize(
    "lose", [killed_before_it_reads, killed_once_it_has_decided, killed_as_workers_start, frozen_before_it_reads]
)
def test_a_failure_is_charged_once_whichever_leader_begins_the_next_round(
    net: Net, launch: Launcher, lose: Callable[[Trio], None]
) -> None:
    with trio(net, launch, options=("--max-restarts", "3")) as there:
        lose(there)
        again = there.team.wait_round(there.at_work, after=there.round)
        assert again.restart == 1, there.team.story
        wait_for("another leads", lambda: any(agent.has_logged(COORDINATES) for agent in there.at_work))
        there.fail()
        last = there.team.wait_round(there.at_work, after=again)
        assert last.restart == 2, "the next leader has counted the first"
        assert [len(agent.starts) for agent in there.at_work] == [3, 3], there.team.story


# Requests.

SAVING: dict[str, Any] = {"worker": WORKER, "nnodes": "1:2", "env": {"STAR_TICK_S": "0.02", "STAR_SAVES": "1"}}


@pytest.mark.all
@pytest.mark.ci
def test_a_host_stays_cordoned_when_the_leader_that_acknowledged_it_is_killed(net: Net, launch: Launcher) -> None:
    with trio(net, launch, options=NO_RESTARTS, **SAVING) as there:
        asker, other = there.at_work
        assert verb(asker.folder, "cordon", "node2").code == 0
        there.leader.crash()
        other.wait_logged("this node is cordoned for ")
        alone = there.team.wait_round([asker], after=there.round)
        assert verb(asker.folder, "restart").code == 0
        alone = there.team.wait_round([asker], after=alone)
        assert verb(asker.folder, "uncordon", "node2").code == 0
        last = there.team.wait_round([asker, other], after=alone)
        assert last.restart == 0
        there.team.finish(last)


@pytest.mark.all
@pytest.mark.ci
def test_a_node_is_drained_when_the_leader_that_acknowledged_it_is_killed(net: Net, launch: Launcher) -> None:
    with trio(net, launch, options=NO_RESTARTS, **SAVING) as there:
        asker, other = there.at_work
        assert verb(asker.folder, "drain", "node2", "--deadline", "120").code == 0
        there.leader.crash()
        assert other.wait() == EXIT_TRY_AGAIN, there.team.story
        alone = there.team.wait_round([asker], after=there.round)
        assert alone.restart == 0
        there.team.finish(alone)


@pytest.mark.all
@pytest.mark.parametrize("options", [(), ("--at-save",)], ids=["at once", "at save"])
def test_workers_are_restarted_when_the_leader_that_acknowledged_it_is_killed(
    net: Net, launch: Launcher, options: Sequence[str]
) -> None:
    with trio(net, launch, options=NO_RESTARTS, **SAVING) as there:
        assert verb(there.agents[1].folder, "restart", *options).code == 0
        there.leader.crash()
        again = there.team.wait_round(there.at_work, after=there.round)
        assert again.restart == 0, "it was requested"
        there.team.finish(again)


@pytest.mark.all
def test_a_host_takes_part_again_when_the_leader_that_acknowledged_it_is_killed(net: Net, launch: Launcher) -> None:
    with trio(net, launch, options=NO_RESTARTS, **SAVING) as there:
        asker, other = there.at_work
        assert verb(asker.folder, "cordon", "node2").code == 0
        without = there.team.wait_round([asker, there.leader], after=there.round)
        assert verb(asker.folder, "uncordon", "node2").code == 0
        there.leader.crash()
        last = there.team.wait_round([asker, other], after=without)
        assert last.restart == 0
        there.team.finish(last)


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("options", [(), ("--at-save",)], ids=["at once", "at save"])
def test_a_job_is_stopped_when_the_leader_that_acknowledged_it_is_killed(
    net: Net, launch: Launcher, options: Sequence[str]
) -> None:
    with trio(net, launch, options=NO_RESTARTS, **SAVING) as there:
        assert verb(there.agents[1].folder, "stop", *options).code == 0
        there.leader.signal(signal.SIGKILL)
        code = EXIT_TRY_AGAIN if options else -signal.SIGTERM
        assert [agent.wait() for agent in there.at_work] == [code, code], there.team.story
        assert [len(agent.starts) for agent in there.at_work] == [1, 1], there.team.story


@pytest.mark.all
@pytest.mark.ci
def test_a_job_is_stopped_when_the_leader_that_acknowledged_it_and_the_node_that_asked_are_killed(
    net: Net, launch: Launcher
) -> None:
    """The remaining node has never received the request."""
    with trio(net, launch, options=NO_RESTARTS, **{**SAVING, "worker": DEAF}) as there:
        asker, other = there.at_work
        assert verb(asker.folder, "stop", "--at-save", "--deadline", "120").code == 0
        for agent in (there.leader, asker):
            agent.signal(signal.SIGKILL)
        assert other.wait() in (EXIT_TRY_AGAIN, -signal.SIGTERM), there.team.story
        assert other.has_logged("stop requested on node1"), there.team.story


@pytest.mark.all
@pytest.mark.ci
def test_a_failure_is_still_held_for_somebody_to_look_when_the_leader_is_killed(net: Net, launch: Launcher) -> None:
    with trio(net, launch, lease_s=LONG_LEASE_S, options=("--max-restarts", "3", "--on-failure", "hold")) as there:
        there.fail()
        there.failing.wait_logged("held: nothing is stopped until ")
        kill_host(there.leader)
        wait_for("another leads", lambda: any(agent.has_logged(COORDINATES) for agent in there.at_work))
        time.sleep(1.0)
        assert alive(there.agents[2].starts[-1].pid), there.team.story
        assert [len(agent.starts) for agent in there.at_work] == [1, 1], there.team.story
        assert verb(there.agents[2].folder, "restart").code == 0
        again = there.team.wait_round(there.at_work, after=there.round)
        assert again.restart == 0, "it was requested"
        there.team.finish(again)


@pytest.mark.all
@pytest.mark.ci
def test_a_request_is_acknowledged_once_a_quorum_has_accepted_it(net: Net, launch: Launcher) -> None:
    """With two voters and the endpoint, the requester alone is less than half."""
    with trio(net, launch, lease_s=LONG_LEASE_S, options=NO_RESTARTS) as there:
        asker, _ = there.at_work
        undo_cut = net.isolate(there.endpoint, there.nodes)
        wake = there.freeze(2)
        outputs = list[Output]()
        asking = threading.Thread(target=lambda: outputs.append(verb(asker.folder, "cordon", "node0")))
        asking.start()
        asking.join(2.0)
        assert not outputs, "one of two voters has accepted it"
        wake()
        asking.join(DEADLINE_S)
        assert [each.code for each in outputs] == [0], (outputs, there.team.story)
        there.team.assert_untouched(there.round)
        undo_cut()
