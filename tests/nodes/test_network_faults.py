"""Agents on nodes of their own, over networks that are cut, slow, of another kind, or more than one."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.effort import EFFORT, REPETITIONS
from kit.faults import netns
from kit.faults.chaos import STORE
from kit.faults.netns import Net, Node
from kit.faults.star import STAR
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher, wait_for
from kit.ports import listening

from aelastic.errors import EXIT_FAILURE

# The start of a store's process is part of it.
JOIN_TIMEOUT_S = 8.0
PORT = 29400
LEASE_S = 2.0
# What a node is missed after: so the README promises it.  Then others may work on the machine, too.
MISSED_S = LEASE_S + 1.0
LOAD_S = 3.0
# How long a cut lasts that begins two sides, after what each was seen to do.
CUT_S = {"soak": 60.0}.get(EFFORT, 2 * LEASE_S)
COORDINATES = "this agent is coordinator now ("

# Tells where it stands, and whether the store of group rank 0 can be reached; dies of its peers, and ends when told to.
WORKER = f"""{STAR}

address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
said = rank, os.environ["WORLD_SIZE"], restart, address, port, socket.gethostname(), os.environ["AELASTIC_ROUND"]
say("start", *said)
until = time.monotonic() + 20.0
while True:
    try:
        socket.create_connection((address, int(port)), 20.0).close()
        break
    except ConnectionRefusedError:  # as torch's client: the node of rank 0 may begin a moment later
        if time.monotonic() > until:
            raise
        time.sleep(0.02)
say("reached", rank)
begin_talk()
while not os.path.exists("go"):
    if os.path.exists(f"fail{{restart}}"):
        sys.exit(3)
    time.sleep(0.02)
say_farewell()
"""

ALL_REDUCE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(3) * (rank + 1)
dist.all_reduce(total)
say("sum", rank, int(total[0]), os.environ["MASTER_ADDR"])
dist.barrier()
dist.destroy_process_group()
"""

# A name server that writes down what it is asked, and knows nothing; a silent one does not even say so.
NAME_SERVER = """
import socket, sys

server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 53))
print("ready", flush=True)
while True:
    question, peer = server.recvfrom(4096)
    labels, at = [], 12
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode())
        at += 1 + question[at]
    with open(sys.argv[2], "a") as asked:
        print(".".join(labels), file=asked)
    # The same question, as an answer: there is no such name (RFC 1035, 4.1.1).
    if sys.argv[3] != "silent":
        server.sendto(question[:2] + b"\\x81\\x83" + question[4:6] + b"\\0\\0\\0\\0\\0\\0" + question[12:at + 5], peer)
"""


@dataclass(frozen=True)
class Start:
    """What a worker has said of its round."""

    rank: int
    world_size: int
    restart: int
    master_addr: str
    master_port: int
    host: str
    fence: int


def starts(job: Job) -> list[Start]:
    words = [line.split()[1:] for line in job.lines if line.startswith("start ")]
    return [Start(int(w[0]), int(w[1]), int(w[2]), w[3], int(w[4]), w[5], int(w[6])) for w in words]


class Agents:
    """The agents of one job, each on a node."""

    def __init__(
        self, launch: Launcher, endpoint: str, nnodes: str, *, lease_s: float = LEASE_S, join_timeout_s: float = 600.0
    ) -> None:
        self.launch = launch
        self.jobs: list[Job] = []
        self.options = (
            *("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"),
            *("--rdzv-conf", f"last_call_timeout=2,lease={lease_s:g},join_timeout={join_timeout_s:g}"),
        )

    def start(self, node: Node, *options: str, worker: str = WORKER, env: dict[str, str] | None = None) -> Job:
        """Starts an agent, with one worker."""
        name = f"agent{len(self.jobs)}"
        star = self.launch.folder / "star"
        star.mkdir(exist_ok=True)
        env = {"LOGLEVEL": "INFO", "STAR": str(star), **(env or {})}
        job = self.launch(worker, *self.options, *options, name=name, env=env, prefix=node.prefix)
        self.jobs.append(job)
        return job

    def wait_round(self, jobs: Sequence[Job], after: Sequence[int] = ()) -> list[Start]:
        """Waits until some agents, and they alone, are in one round, and have all reached its rank 0.

        Args:
            jobs: which.
            after: for each, how many workers it had started before.
        """

        def found() -> list[Start]:
            for job in jobs:
                assert job.process.poll() is None, f"an agent ended (code {job.process.returncode})\n{job.story}"
            all_starts = [starts(job) for job in jobs]
            if any(len(s) <= n for s, n in zip(all_starts, after or [0] * len(jobs), strict=True)):
                return []
            if not all(job.lines[-1].startswith("reached ") for job in jobs):
                return []
            last = [s[-1] for s in all_starts]
            is_whole = sorted(s.rank for s in last) == list(range(len(jobs)))
            is_same = len({(s.world_size, s.master_addr, s.master_port) for s in last}) == 1
            return last if is_whole and is_same and last[0].world_size == len(jobs) else []

        what = f"a round of {len(jobs)}"
        try:
            found_starts: list[Start] = wait_for(what, found, LAUNCH_TIMEOUT_S / 2)
        except pytest.fail.Exception:
            stories = "\n\n".join(f"{job.folder.name}: {job.story}" for job in self.jobs)
            pytest.fail(f"never {what}:\n{stories}")
        return found_starts

    def counts(self, jobs: Sequence[Job] | None = None) -> list[int]:
        return [len(starts(job)) for job in (self.jobs if jobs is None else jobs)]

    def coordinators(self) -> list[int]:
        """How often each agent has become the coordinator."""
        return [job.stderr.count(COORDINATES) for job in self.jobs]

    def finish(self) -> None:
        """Lets the workers end, and with them the job."""
        for job in self.jobs:
            job.go()
        for job in self.jobs:
            assert job.wait() == 0, job.story


@pytest.fixture
def v4() -> Iterator[Net]:
    """A network without IPv6."""
    with netns.opened() as net:
        yield net


def serve_board(net: Net, node: Node) -> str:
    """Starts a store on a node; gives its endpoint."""
    popen = net.start(node, sys.executable, "-c", STORE, str(PORT))
    assert popen.stdout is not None and popen.stdout.readline() == b"ready\n"
    return f"{node.v4()}:{PORT}" if net.has_v4 else f"[{node.v6()}]:{PORT}"


# Where the nodes find each other.


def found_at(jobs: Sequence[Job]) -> list[dict[int, set[str]]]:
    """Where each agent and its helpers listen, by port; workers meet at ports of their own (`kit.faults.star`)."""
    return [listening(pid for pid in job.left() if not is_worker(pid)) for job in jobs]


def is_worker(pid: int) -> bool:
    try:
        return b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True  # it has ended


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_each_port_listens_where_other_nodes_are_told_to_come(family: str, launch: Launcher, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of the tests, in one line")
    with netns.opened(has_v4=family == "v4", has_v6=family == "v6") as net:
        nodes = [net.node() for _ in range(3)]
        own = [getattr(node, family)() for node in nodes]
        agents = Agents(launch, f"[{own[0]}]:{PORT}" if ":" in own[0] else f"{own[0]}:{PORT}", "3")
        # Rank 0 is another node than that of the endpoint.
        ranks = [["--node-rank", "0"] if node is nodes[2] else [] for node in nodes]
        options = ["--secret-file", str(secret), "--max-restarts", "3"]
        jobs = [agents.start(node, *options, *rank) for node, rank in zip(nodes, ranks, strict=True)]
        before = agents.wait_round(jobs)
        for _ in range(2):
            assert before[2].rank == 0 and {start.master_addr for start in before} == {own[2]}
            for address, ports in zip(own, found_at(jobs), strict=True):
                elsewhere = {port: at for port, at in ports.items() if at - {"127.0.0.1", "::1"} != {address}}
                assert ports and not elsewhere, agents.jobs[own.index(address)].story
            counts = agents.counts()
            jobs[1].folder.joinpath(f"fail{before[1].restart}").touch()
            before = agents.wait_round(jobs, counts)
        assert not [job for job in jobs if "all addresses" in job.stderr]
        agents.finish()


def test_a_node_listens_at_all_addresses_if_told_to_or_if_others_know_it_by_one_that_it_has_not(
    v4: Net, launch: Launcher
) -> None:
    nodes = [v4.node() for _ in range(2)]
    elsewhere = "10.99.0.1"  # as a router's that leads to this node
    nodes[1].run(f"ip route add {elsewhere} via 10.71.{nodes[1].number}.1")
    v4.forward(elsewhere, nodes[0])
    agents = Agents(launch, f"{nodes[0].v4()}:{PORT}", "2")
    first = agents.start(nodes[0], "--local-addr", elsewhere)
    wait_for("it coordinates", lambda: COORDINATES in first.stderr)
    jobs = [first, agents.start(nodes[1], "--bind-all", "--node-rank", "0")]
    agents.wait_round(jobs)
    known, told = found_at(jobs)
    everywhere = [port for port, at in known.items() if at & {"0.0.0.0", "::"}]
    assert len(everywhere) == 2 and PORT not in everywhere, "coordinator and votes; the endpoint is its own address"
    assert "at all addresses of this host" in jobs[0].stderr, "one line says so"
    assert all(at & {"0.0.0.0", "::"} for at in told.values()) and "all addresses" not in jobs[1].stderr
    agents.finish()


@pytest.mark.all
@pytest.mark.parametrize("family", ["v4", "v6"])
def test_torch_meets_across_nodes(family: str, launch: Launcher) -> None:
    with netns.opened(has_v4=family == "v4", has_v6=family == "v6") as net:
        nodes = [net.node() for _ in range(2)]
        address = getattr(nodes[0], family)()
        agents = Agents(launch, f"[{address}]:{PORT}" if ":" in address else f"{address}:{PORT}", "2", lease_s=10.0)
        jobs = [agents.start(node, worker=ALL_REDUCE, env={"GLOO_SOCKET_IFNAME": "net1"}) for node in nodes]
        for job in jobs:
            assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
            assert job.wait_line("sum")[0].split()[2:] == ["3", address]


@pytest.mark.all
def test_where_the_name_server_is_silent_none_is_asked(v4: Net, launch: Launcher, tmp_path: Path) -> None:
    # Each question would take 20 s.
    server, asked = name_server(v4, tmp_path, "silent")
    nodes = [v4.node(f"node{i}", files=names(tmp_path, server)) for i in range(2)]
    agents = Agents(launch, f"{nodes[0].v4()}:{PORT}", "2")
    jobs = [agents.start(node, "--max-restarts", "1") for node in nodes]
    agents.wait_round(jobs)
    (jobs[1].folder / "fail0").touch()
    agents.wait_round(jobs, after=[1, 1])
    agents.finish()
    assert not asked.exists(), asked.read_text()


def test_a_host_that_calls_itself_127_0_1_1_is_found_by_the_others(v4: Net, launch: Launcher, tmp_path: Path) -> None:
    # What Debian writes into /etc/hosts; the others know the host by its real address.
    server, _ = name_server(v4, tmp_path)
    own, other = tmp_path / "own", tmp_path / "other"
    own.write_text("127.0.0.1 localhost\n127.0.1.1 alpha\n")
    other.touch()
    nodes = [
        v4.node("alpha", files={**names(tmp_path, server), "hosts": own}),
        v4.node("beta", files={**names(tmp_path, server), "hosts": other}),
    ]
    other.write_text(f"127.0.0.1 localhost\n127.0.1.1 beta\n{nodes[0].v4()} alpha\n")
    agents = Agents(launch, f"alpha:{PORT}", "2")
    jobs = [agents.start(node) for node in nodes]
    assert {start.master_addr for start in agents.wait_round(jobs)} <= {node.v4() for node in nodes}
    agents.finish()


def name_server(net: Net, folder: Path, manner: str = "") -> tuple[Node, Path]:
    """Starts a name server on a node of its own; gives that, and where it writes down what it is asked."""
    node, asked = net.node("names"), folder / "asked"
    popen = net.start(node, sys.executable, "-c", NAME_SERVER, node.v4(), str(asked), manner)
    assert popen.stdout is not None and popen.stdout.readline() == b"ready\n"
    return node, asked


def names(folder: Path, server: Node) -> dict[str, Path]:
    """How a node looks up names: no file knows any, and one name server is asked."""
    contents = {
        "hosts": "",
        "resolv.conf": f"nameserver {server.v4()}\noptions timeout:10 attempts:2\n",
        "nsswitch.conf": "hosts: files dns\n",
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in contents}


@pytest.mark.parametrize("is_told", [False, pytest.param(True, marks=pytest.mark.all)], ids=["found out", "told"])
def test_of_two_networks_workers_use_the_one_the_agents_met_on_unless_told(
    v4: Net, launch: Launcher, is_told: bool
) -> None:
    """Group ranks follow the names of hosts, in their natural order."""
    nodes = [v4.node(host, networks=(1, 2), default_route=1) for host in ("node10", "node2", "node1")]
    agents = Agents(launch, f"{nodes[1].v4(2)}:{PORT}", "3")
    jobs = [agents.start(node, *(["--local-addr", node.v4(1)] if is_told else [])) for node in nodes]
    round_ = agents.wait_round(jobs)
    assert [(start.host, start.rank) for start in round_] == [("node10", 2), ("node2", 1), ("node1", 0)]
    assert {start.master_addr for start in round_} == {nodes[2].v4(1 if is_told else 2)}
    agents.finish()


# Cut off, and back.


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.all
def test_nodes_are_cut_off_and_come_back_again_and_again(v4: Net, launch: Launcher) -> None:
    """A plain member and the coordinator's node in turn; the board is elsewhere, and the run id stays the same."""
    endpoint = serve_board(v4, v4.node("board"))
    nodes = [v4.node(f"node{i}") for i in range(3)]
    agents = Agents(launch, endpoint, "1:3")
    jobs = [agents.start(node) for node in nodes]
    agents.wait_round(jobs)
    coordinator = agents.coordinators().index(1)
    ways: list[Callable[[Node], None]] = [v4.cut, v4.pull_out, lambda node: v4.cut(node, how="unreachable")]
    missed, back = [], []
    for turn in range(REPETITIONS):
        victim = coordinator if turn % 2 else (coordinator + 1) % 3
        survivors = [job for i, job in enumerate(jobs) if i != victim]
        counts, reigns = agents.counts(), agents.coordinators()
        began = time.monotonic()
        ways[turn // 2 % 3](nodes[victim])
        agents.wait_round(survivors, after=[count for i, count in enumerate(counts) if i != victim])
        missed.append(time.monotonic() - began)
        changed = [i for i, (now, then) in enumerate(zip(agents.coordinators(), reigns, strict=True)) if now > then]
        assert len(changed) == turn % 2, changed
        coordinator = changed[0] if changed else coordinator
        # Whether its workers are of use still cannot be said there; with `1:3` it must not go on alone.
        assert agents.counts()[victim] == counts[victim]
        began = time.monotonic()
        counts = agents.counts()
        v4.heal()
        agents.wait_round(jobs, after=counts)
        back.append(time.monotonic() - began)
    assert statistics.median(missed) < MISSED_S + LOAD_S, (missed, back)
    agents.finish()


@pytest.mark.all
def test_a_cut_that_is_shorter_than_a_lease_disturbs_no_node(v4: Net, launch: Launcher) -> None:
    nodes = [v4.node(f"node{i}") for i in range(2)]
    agents = Agents(launch, f"{nodes[0].v4()}:{PORT}", "1:2", lease_s=6.0)
    jobs = [agents.start(node) for node in nodes]
    agents.wait_round(jobs)
    counts = agents.counts()  # one of them may have begun alone
    for _ in range(3):
        unheard = nodes[1].tcp_count("RetransSegs")
        v4.cut(nodes[1])
        nodes[1].wait_tcp_count("RetransSegs", unheard + 2)
        v4.heal()
        for node in nodes:
            node.wait_delivered()  # else three short cuts are a long one, for a connection that tries again in each
    agents.finish()
    assert agents.counts() == counts, [job.story for job in jobs]


def test_while_the_board_is_cut_off_workers_run_on_and_a_restart_waits_for_it(v4: Net, launch: Launcher) -> None:
    board = v4.node("board")
    endpoint = serve_board(v4, board)
    nodes = [v4.node(f"node{i}") for i in range(2)]
    agents = Agents(launch, endpoint, "2")
    jobs = [agents.start(node, "--max-restarts", "1") for node in nodes]
    agents.wait_round(jobs)
    coordinator = nodes[agents.coordinators().index(1)]
    v4.cut(board)
    # On a connection that was cut, TCP tries again ever more rarely: new ones show that the way is free again.
    coordinator.wait_tcp_count("ActiveOpens", coordinator.tcp_count("ActiveOpens") + 3)
    (jobs[0].folder / "fail0").touch()
    wait_for("the failure is seen", lambda: "failed on node0" in jobs[0].stderr)
    assert agents.counts() == [1, 1]
    v4.heal()
    assert {start.restart for start in agents.wait_round(jobs, after=[1, 1])} == {1}
    agents.finish()


@pytest.mark.all
def test_new_agents_with_the_endpoint_begin_no_round_beside_the_one_that_is_cut_off_with_them(
    v4: Net, launch: Launcher
) -> None:
    """The endpoint is no agent's: it goes on naming a coordinator that is silent, and the round that this one began."""
    board = v4.node("board")
    agents = Agents(launch, serve_board(v4, board), "2:5")
    at_work, new = ([v4.node(f"node{i}") for i in each] for each in (range(3), range(3, 5)))
    jobs = [agents.start(node) for node in at_work]
    agents.wait_round(jobs)
    for node in at_work:
        for other in (board, *new):
            v4.cut(node, other)
    newcomers = [agents.start(node) for node in new]
    # So they say every 10 s; until a lease had passed they would have waited in any case.
    waits = "2 of 2-5 nodes joined", "node0, node1, node2 cannot be reached and may be running without this node"
    wait_for("they wait", lambda: any(all(words in job.stderr for words in waits) for job in newcomers))
    time.sleep(CUT_S)
    assert agents.counts() == [1, 1, 1, 0, 0]
    v4.heal()
    starts = agents.wait_round(agents.jobs, after=[1, 1, 1, 0, 0])
    assert {start.restart for start in starts} == {0}
    # None of the three was stopped before there was a round with the others.  The one that coordinated learns that another
    # does when its way to the board is back, which may be later than for the two: then it joins their round.
    with_all = [[2, 2, 2, 1, 1]]
    without_one = [[2 if place == late else count for place, count in enumerate([3, 3, 3, 2, 2])] for late in range(3)]
    assert agents.counts() in with_all + without_one, [job.stderr[-1500:] for job in agents.jobs]
    agents.finish()


@pytest.mark.all
def test_two_sides_of_which_one_has_an_empty_endpoint_are_told_apart_and_become_one(v4: Net, launch: Launcher) -> None:
    """The page on endpoints says that an empty one knows of no round; so both sides are at work, under two fences."""
    nodes = [v4.node(f"node{i}") for i in range(5)]
    agents = Agents(launch, f"{nodes[0].v4()}:{PORT}", "2:5")
    gone = agents.start(nodes[0])
    wait_for("it coordinates", lambda: COORDINATES in gone.stderr)
    rest = [agents.start(node) for node in nodes[1:4]]
    agents.wait_round([gone, *rest])
    gone.process.kill()
    gone.process.wait()
    agents.wait_round(rest, after=[1, 1, 1])
    for node in nodes[1:4]:
        for other in (nodes[0], nodes[4]):
            v4.cut(node, other)
    new = [agents.start(nodes[0]), agents.start(nodes[4])]
    begun = agents.wait_round(new)
    time.sleep(CUT_S)
    assert agents.counts(rest + new) == [2, 2, 2, 1, 1], "each side goes on"
    assert min(start.fence for start in begun) > max(start.fence for job in rest for start in starts(job))
    v4.heal()
    agents.jobs.remove(gone)
    assert {start.restart for start in agents.wait_round(rest + new, after=[2, 2, 2, 1, 1])} == {0}
    agents.finish()


@pytest.mark.all
def test_a_node_that_stays_cut_off_gives_up_in_the_end(v4: Net, launch: Launcher) -> None:
    nodes = [v4.node(f"node{i}") for i in range(2)]
    agents = Agents(launch, f"{nodes[0].v4()}:{PORT}", "1:2", join_timeout_s=JOIN_TIMEOUT_S)
    jobs = [agents.start(nodes[0])]
    jobs[0].wait_line("reached")
    jobs.append(agents.start(nodes[1]))
    agents.wait_round(jobs, after=[1, 0])
    v4.cut(nodes[1])
    assert jobs[1].wait() == EXIT_FAILURE, jobs[1].story
    assert f"no coordinator for {JOIN_TIMEOUT_S:g} s" in jobs[1].stderr.splitlines()[-1], jobs[1].story
    jobs.pop().assert_nothing_left()
    agents.wait_round(jobs, after=[2])


@pytest.mark.all
def test_a_node_that_is_cut_off_from_the_coordinator_alone_disturbs_no_other(v4: Net, launch: Launcher) -> None:
    endpoint = serve_board(v4, v4.node("board"))
    nodes = [v4.node(f"node{i}") for i in range(3)]
    agents = Agents(launch, endpoint, "2:3")
    jobs = [agents.start(node) for node in nodes]
    agents.wait_round(jobs)
    coordinator = agents.coordinators().index(1)
    outsider = (coordinator + 1) % 3
    rest = [job for i, job in enumerate(jobs) if i != outsider]
    one, other = nodes[coordinator], nodes[outsider]
    ways: list[Callable[[], None]] = [
        lambda: v4.cut(one, other),
        lambda: v4.cut_one_way(one, other),
        lambda: v4.cut_one_way(other, one),
    ]
    for cut in ways:
        counts = agents.counts(rest)
        cut()
        agents.wait_round(rest, after=counts)
        counts, attempts = agents.counts(rest), other.tcp_count("ActiveOpens")
        # Each attempt takes longer than a lease.
        other.wait_tcp_count("ActiveOpens", attempts + 2)
        assert agents.counts(rest) == counts
        counts = agents.counts()
        v4.heal()
        agents.wait_round(jobs, after=counts)
        assert sum(agents.coordinators()) == 1
    agents.finish()


@pytest.mark.all
def test_a_slow_network_that_loses_packets_carries_a_job_through_a_restart(v4: Net, launch: Launcher) -> None:
    # From node to node a packet takes 100 ms; of 20, one is lost.
    nodes = [v4.node(delay_s=0.05, loss=0.025) for _ in range(3)]
    agents = Agents(launch, f"{nodes[0].v4()}:{PORT}", "3", lease_s=5.0)
    jobs = [agents.start(node, "--max-restarts", "1") for node in nodes]
    agents.wait_round(jobs)
    (jobs[2].folder / "fail0").touch()
    assert {start.restart for start in agents.wait_round(jobs, after=[1, 1, 1])} == {1}
    agents.finish()
