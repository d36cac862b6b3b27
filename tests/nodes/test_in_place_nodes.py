"""Recovery in place across several agents, with workers that send the library's messages without torch.

A worker enters each round that its agent begins, and reports it as a start; it does not exit when a peer does.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from kit.agents import FAIL, FINISH, REPORTED, Round, Team, c10d, team_of
from kit.launching import Launcher, alive
from kit.verbs import verb
from kit.waiting import wait_for

from aelastic.errors import EXIT_TRY_AGAIN

pytestmark = pytest.mark.usefixtures("warm_stores")

WORKER = f"""
import os, select, signal, socket, sys, time
from aelastic.training import messages

def fail(*_):
    sys.stderr.write("ValueError: batch is empty\\n")
    os._exit(7)

def finish(*_):
    link.send(messages.encode("done", round=entered))

def packets():
    # A signal that comes between the interpreter's last look for signals and a plain `recv` would be handled when a packet
    # comes, which may be never.  It writes into the pipe.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([link, reader], [], [])
        if reader in ready:
            os.read(reader, 100)
        if link in ready:
            yield link.recv(messages.MAX_PACKET)

def tell_start():
    names = {(*REPORTED, "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")!r}
    words = ["start", str(os.getpid()), *(os.environ[name] for name in names)]
    os.write(1, (" ".join(words) + "\\n").encode())

link, entered = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), -1
signal.signal({int(FAIL)}, fail)
signal.signal({int(FINISH)}, finish)

is_ahead = "MASTER_ADDR" not in os.environ
assert not is_ahead or int(os.environ["RANK"]) >= 2
os.write(1, f"arrives {{os.getpid()}} {{'ahead' if is_ahead else 'in a round'}}\\n".encode())
while os.path.exists("imports"):
    time.sleep(0.01)
if is_ahead and os.path.exists("makes-a-group"):
    fail()
if not is_ahead and os.environ["GROUP_RANK"] == os.environ.get("OPTS_OUT"):
    tell_start()
    while True:
        signal.pause()
link.connect(messages.socket_path(os.environ[messages.SOCKET_VARIABLE]))
link.send(messages.encode("ready", round=-1, step=-1))
for packet in packets():
    if not packet:
        break
    message = messages.decode(packet)
    if message["kind"] == "begin":
        os.environ.update({{name: value for name, value in message["env"].items() if value is not None}})
        entered = message["round"]
        assert entered == int(os.environ["AELASTIC_ROUND"])
        tell_start()
        link.send(messages.encode("shared", round=entered, step=17, source=0))
    elif message["kind"] == "held":
        os.write(1, f"held {{os.getpid()}} in round {{message['round']}}\\n".encode())
    elif message["kind"] == "over" and not os.path.exists(os.environ["STAR"] + "/stays-" + str(os.getpid())):
        os.write(1, f"over {{os.getpid()}} in round {{message['round']}}\\n".encode())
        while os.path.exists(os.environ["STAR"] + "/lingers"):
            time.sleep(0.01)
        link.send(messages.encode("ready", round=message["round"], step=17))
    elif message["kind"] == "end":
        sys.exit(0)
"""


def in_place_team(launch: Launcher, nnodes: str, **more: Any) -> Any:
    conf = {"last_call_timeout": 1, "settle_time": 0.1}
    return team_of(launch, c10d(), nnodes, worker=WORKER, **{"conf": conf, "nproc": 2, **more})


def started(team: Team, nodes: int) -> Round:
    """Waits until all workers are in a round, and the leader knows that each node has opted in.

    Workers begin before their agent reports it.  The leader receives the agent's own questions after that report.
    """
    round_ = team.wait_round(team.start_many(nodes))
    for agent in team.agents:
        assert verb(agent.folder, "status").code == 0
    return round_


def test_the_others_keep_their_processes_when_a_worker_of_one_node_is_lost(launch: Launcher) -> None:
    with in_place_team(launch, "2") as team:
        first = started(team, 2)
        lost = first.starts[1]
        os.kill(lost.pid, signal.SIGKILL)
        second = team.wait_round(team.agents, after=first)

        assert first.pids - second.pids == {lost.pid}, team.story
        assert (second.restart, second.starts[1].rank) == (1, 1)
        for agent in team.agents:
            agent.wait_logged(r"recovering in place: rank 1 failed")
            agent.wait_logged(r"continues in place: [12] of 2 workers kept, state of step 17 from rank 0")
        team.finish(second)


def test_a_node_that_is_lost_and_one_that_joins_leave_the_others_their_processes(launch: Launcher) -> None:
    with in_place_team(launch, "1:2") as team:
        first = started(team, 2)
        last = max(team.agents, key=lambda agent: agent is not team.coordinator)
        (rest,) = [agent for agent in team.agents if agent is not last]
        kept = {start.pid for start in rest.starts}
        last.crash()
        second = team.wait_round([rest], after=first)
        assert (second.pids, second.restart, len(second.starts)) == (kept, 0, 2), team.story

        third = team.wait_round([rest, team.start()], after=second)
        assert kept < third.pids and third.restart == 0 and len(third.starts) == 4, team.story
        team.finish(third)


def test_the_leaders_node_is_lost_and_the_others_keep_their_processes(launch: Launcher) -> None:
    with in_place_team(launch, "2:3", conf={"last_call_timeout": 1, "settle_time": 0.1, "lease": 1.5}) as team:
        first = started(team, 3)
        leader = team.coordinator
        rest = [agent for agent in team.agents if agent is not leader]
        kept = {start.pid for agent in rest for start in agent.starts}
        leader.crash()
        second = team.wait_round(rest, after=first)
        assert second.pids == kept, team.story
        team.finish(second)


def test_the_leader_is_lost_when_workers_have_left_one_round_and_not_begun_the_next(launch: Launcher) -> None:
    with in_place_team(launch, "2:3") as team:
        first = started(team, 3)
        leader = team.coordinator
        rest = [agent for agent in team.agents if agent is not leader]
        lingers = launch.folder / "star" / "lingers"
        lingers.touch()
        lost = rest[0].starts[0].pid
        kept = {start.pid for agent in rest for start in agent.starts} - {lost}
        os.kill(lost, signal.SIGKILL)
        for agent in rest:
            for pid in kept & {start.pid for start in agent.starts}:
                agent.wait_line(f"over {pid} in round {first.number}")
        assert all(agent.starts[-1].round == first.number for agent in team.agents), team.story

        leader.crash()
        lingers.unlink()
        second = team.wait_round(rest, after=first)
        assert second.pids > kept and lost not in second.pids and len(second.pids) == 4, team.story
        team.finish(second)


def test_where_the_workers_of_one_node_have_not_opted_in_all_restart(launch: Launcher) -> None:
    with in_place_team(launch, "2", env={"OPTS_OUT": "0"}) as team:
        first = started(team, 2)
        os.kill(first.starts[-1].pid, signal.SIGKILL)
        second = team.wait_round(team.agents, after=first)
        assert not first.pids & second.pids and second.restart == 1, team.story
        (agent,) = [each for each in team.agents if each.has_logged("not continuing in place")]
        assert agent.has_logged("not all workers of the job can leave the round; restarting all workers"), agent.story


def test_two_workers_of_two_nodes_are_lost_at_once(launch: Launcher) -> None:
    with in_place_team(launch, "2") as team:
        first = started(team, 2)
        lost = {first.starts[0].pid, first.starts[3].pid}
        for pid in lost:
            os.kill(pid, signal.SIGKILL)

        def recovered() -> Round | None:
            round_ = team.wait_round(team.agents, after=first)
            return None if lost & round_.pids or not all(map(alive, round_.pids)) else round_

        last: Round = wait_for("both are replaced", recovered)
        assert first.pids - last.pids == lost, team.story
        team.finish(last)


@pytest.mark.all
@pytest.mark.ci
def test_a_survivor_that_does_not_leave_its_round_is_killed_and_replaced(launch: Launcher) -> None:
    wrapper = "from aelastic.agent.group import worker_group\nworker_group.GRACE_S = 0.5\n"
    with in_place_team(launch, "2", wrapper=wrapper) as team:
        first = started(team, 2)
        stays, lost = first.starts[2], first.starts[0]
        (launch.folder / "star" / f"stays-{stays.pid}").touch()
        os.kill(lost.pid, signal.SIGKILL)
        second = team.wait_round(team.agents, after=first)
        assert first.pids - second.pids == {stays.pid, lost.pid} and second.restart == 1, team.story
        team.finish(second)


@pytest.mark.all
@pytest.mark.ci
def test_a_failure_is_held_for_somebody_to_look_and_the_others_keep_their_processes(launch: Launcher) -> None:
    with in_place_team(launch, "1", options=("--max-restarts", "3", "--on-failure", "hold:1"), nproc=3) as team:
        (agent,) = team.start_many(1)
        before = team.wait_round([agent])
        for _ in range(2):  # each failure is held, and each round is left
            lost = before.starts[1].pid
            os.kill(lost, signal.SIGKILL)
            agent.wait_line(f"held {before.starts[0].pid} in round {before.number}")
            after = team.wait_round([agent], after=before)
            assert before.pids - after.pids == {lost}, team.story
            before = after
        assert agent.has_logged("held: nothing is stopped until aelastic restart or stop, or 1 s have passed", 2)
        team.finish(before)


def test_a_restart_that_is_requested_ends_processes(launch: Launcher) -> None:
    with in_place_team(launch, "2") as team:
        first = started(team, 2)
        assert verb(team.agents[0].folder, "restart").code == 0
        second = team.wait_round(team.agents, after=first)
        assert not first.pids & second.pids and second.restart == 0, team.story
        team.finish(second)


def test_the_person_who_runs_a_job_may_turn_it_off(launch: Launcher) -> None:
    with in_place_team(launch, "1", options=("--recovery", "restart", "--max-restarts", "0")) as team:
        assert team.start().wait() == 1
        assert "KeyError: 'AELASTIC_IN_PLACE'" in team.story  # such a worker runs as under torchrun


def test_workers_that_are_done_are_called_again_when_another_is_lost(launch: Launcher) -> None:
    with in_place_team(launch, "1") as team:
        first = started(team, 1)
        done, lost = first.starts
        os.kill(done.pid, FINISH)
        os.kill(lost.pid, FAIL)
        second = team.wait_round(team.agents, after=first)
        assert first.pids - second.pids == {lost.pid}, team.story
        team.finish(second)


def test_a_drained_node_leaves_and_the_others_keep_their_processes(launch: Launcher) -> None:
    with in_place_team(launch, "1:2") as team:
        first = started(team, 2)
        asker, leaver = team.agents
        kept = {start.pid for start in asker.starts}
        output = verb(leaver.folder, "drain", "--deadline", "60")
        assert output.code == 0, output
        second = team.wait_round([asker], after=first)
        assert (second.pids, second.restart) == (kept, 0), team.story
        assert leaver.wait() == EXIT_TRY_AGAIN, team.story
        team.finish(second)


# Nodes that join.

STARTS_AHEAD = "after the workers of new nodes have started"


def start_late(team: Team, *options: str, file: str = "imports") -> Any:
    """Starts one more agent whose workers find this file."""
    folder = team.launcher.folder / f"{team.run_id}-{len(team.agents)}"
    folder.mkdir()
    (folder / file).touch()
    return team.start(*options)


def arrived(agent: Any, how: str = "ahead") -> set[int]:
    """Waits until an agent has started all its workers, ahead of a round or in one; returns their pids."""

    def found() -> set[int] | None:
        pids = {int(line.split()[1]) for line in agent.lines if line.startswith("arrives ") and line.endswith(how)}
        return pids if len(pids) == agent.nproc else None

    pids: set[int] = wait_for(f"workers of {agent} have started {how}", found)
    return pids


def test_a_node_that_joins_interrupts_the_others_once_its_workers_are_ready(launch: Launcher) -> None:
    with in_place_team(launch, "1:2") as team:
        first = started(team, 1)
        late = start_late(team)
        ahead = arrived(late)
        late.wait_logged(STARTS_AHEAD)  # the settle time is over
        team.assert_untouched(first)

        (late.folder / "imports").unlink()
        second = team.wait_round(team.agents, after=first)
        assert second.pids == first.pids | ahead and second.restart == 0, team.story
        assert first.number + 1 == second.number, "one interruption"
        team.finish(second)


@pytest.mark.all
@pytest.mark.ci
def test_workers_that_make_a_group_too_early_start_in_the_round_that_takes_their_node_in(launch: Launcher) -> None:
    with in_place_team(launch, "1:2") as team:
        first = started(team, 1)
        late = start_late(team, file="makes-a-group")
        second = team.wait_round(team.agents, after=first)
        assert second.pids == first.pids | arrived(late, "in a round") and second.restart == 0, team.story
        late.wait_logged("ended before it was in a round .*the workers of this node start when a round takes it in")
        team.finish(second)


@pytest.mark.all
@pytest.mark.ci
def test_a_round_ends_while_the_workers_of_a_newcomer_start(launch: Launcher) -> None:
    with in_place_team(launch, "1:3") as team:
        first = started(team, 2)
        late = start_late(team)
        ahead = arrived(late)
        os.kill(first.starts[-1].pid, signal.SIGKILL)
        second = team.wait_round(team.agents[:2], after=first)
        assert len(first.pids & second.pids) == 3, team.story

        (late.folder / "imports").unlink()
        third = team.wait_round(team.agents, after=second)
        assert third.pids == second.pids | ahead and third.restart == 1, team.story
        team.finish(third)


@pytest.mark.all
@pytest.mark.ci
def test_the_leader_is_lost_while_the_workers_of_a_newcomer_start(launch: Launcher) -> None:
    with in_place_team(launch, "1:3", conf={"last_call_timeout": 1, "settle_time": 0.1, "lease": 1.5}) as team:
        first = started(team, 2)
        late = start_late(team)
        ahead = arrived(late)
        leader = team.coordinator
        (rest,) = [agent for agent in team.agents[:2] if agent is not leader]
        kept = {start.pid for start in rest.starts}
        leader.crash()
        second = team.wait_round([rest], after=first)
        assert second.pids == kept, team.story

        (late.folder / "imports").unlink()
        third = team.wait_round([rest, late], after=second)
        assert third.pids == kept | ahead, team.story
        team.finish(third)


def test_a_worker_is_lost_while_the_workers_of_a_node_that_the_round_needs_start(launch: Launcher) -> None:
    with in_place_team(launch, "2") as team:
        first = started(team, 2)
        last = max(team.agents, key=lambda agent: agent is not team.coordinator)
        (rest,) = [agent for agent in team.agents if agent is not last]
        lost, kept = (start.pid for start in rest.starts)
        last.crash()
        late = start_late(team)
        ahead = arrived(late)
        os.kill(lost, signal.SIGKILL)  # it waits for the next round

        def replaced() -> int | None:
            arrivals = [int(line.split()[1]) for line in rest.lines if line.startswith("arrives ")]
            return arrivals[-1] if len(arrivals) == 3 else None

        replacement: int = wait_for("it is replaced", replaced)
        (late.folder / "imports").unlink()
        second = team.wait_round([rest, late], after=first)
        assert second.pids == {kept, replacement} | ahead and second.restart == 0, team.story
        team.finish(second)


def test_a_health_check_that_passes_leaves_workers_their_processes(launch: Launcher) -> None:
    with in_place_team(launch, "2", options=("--max-restarts", "3", "--health-check", "true")) as team:
        first = started(team, 2)
        lost = first.starts[1].pid
        os.kill(lost, signal.SIGKILL)
        second = team.wait_round(team.agents, after=first)
        assert first.pids - second.pids == {lost} and second.restart == 1, team.story
        team.finish(second)


def test_the_workers_of_a_spare_wait_for_the_loss_of_a_node(launch: Launcher) -> None:
    with in_place_team(launch, "2:2") as team:
        first = started(team, 2)
        spare = team.start()
        ahead = arrived(spare)
        last = max(team.agents[:2], key=lambda agent: agent is not team.coordinator)
        (rest,) = [agent for agent in team.agents[:2] if agent is not last]
        kept = {start.pid for start in rest.starts}
        last.crash()
        second = team.wait_round([rest, spare], after=first)
        assert second.pids == kept | ahead and second.restart == 0, team.story
        team.finish(second)


def test_the_job_ends_and_the_workers_of_a_spare_with_it(launch: Launcher) -> None:
    with in_place_team(launch, "1:1") as team:
        first = started(team, 1)
        spare = team.start()
        arrived(spare)
        team.finish(first)
        assert not spare.starts, team.story


@pytest.mark.all
@pytest.mark.ci
def test_a_node_that_may_not_recover_in_place_joins_with_workers_of_the_round(launch: Launcher) -> None:
    with in_place_team(launch, "1:2", env={"OPTS_OUT": "1"}) as team:
        first = started(team, 1)
        late = team.start("--recovery", "restart")
        second = team.wait_round(team.agents, after=first)
        assert second.pids == first.pids | arrived(late, "in a round"), team.story
