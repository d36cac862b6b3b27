"""Jobs with a secret: strangers get nowhere, and the secret can change while the job runs."""

from __future__ import annotations

import os
import re
import resource
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
import pytest
from kit.agents import FAIL, FINISH, HASTY, NEVER_LOGGED, Meeting, Round, Team, c10d, team_of
from kit.effort import EFFORT
from kit.hostile import KINDS, Knowledge, attack, half_open, record
from kit.launching import Launcher
from kit.ports import quiet_port

from aelastic.cli.doctor.endpoint_checks import check_endpoints
from aelastic.cli.doctor.finding import Finding
from aelastic.errors import EXIT_INPUT
from aelastic.rdzv.protocol.handshake import ProofError
from aelastic.rdzv.protocol.keys import Key
from aelastic.rdzv.settings import RendezvousSettings

pytestmark = pytest.mark.usefixtures("warm_stores")

HOST = "127.0.0.1"
SESSIONS, HALF_OPEN = {"quick": (25, 100), "all": (75, 300), "soak": (1000, 5000)}[EFFORT]


def put(path: Path, *lines: str) -> None:
    """Replaces the file, as an orchestrator does."""
    new = path.with_name(f"{path.name}.new")
    new.touch(0o600)
    new.write_text("".join(f"{line}\n" for line in lines))
    new.rename(path)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    put(path, secrets.token_hex(32))
    return path


@pytest.fixture
def descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def finish(team: Team, last: Round) -> None:
    last.send_signal(FINISH)
    for agent in team.live:
        assert agent.wait() == 0, team.story


def store_ports(team: Team, round_: Round) -> set[int]:
    """Ports on which agents wait to take over a store: they never answer strangers, so a connection would hang."""
    return {int(team.meeting.endpoint.rpartition(":")[2]), round_.starts[0].master_port}


def coordinator_port(team: Team, round_: Round, key: Key) -> int:
    """The leader's port for members, among its open ports."""
    for port in team.coordinator.ports() - store_ports(team, round_):
        with suppress(OSError, AssertionError, ProofError):  # that port is for votes
            record(HOST, port, key, Knowledge(team.run_id, "no-token", ()).hello)
            return port
    raise AssertionError(f"no port of the coordinator's\n{team.story}")


@pytest.mark.all
@pytest.mark.usefixtures("descriptors")
@pytest.mark.timeout(400)  # some sessions are closed after 5 s only, and other tests may have both cores
def test_strangers_neither_join_nor_end_a_job_nor_disturb_its_rounds(launch: Launcher, secret: Path) -> None:
    text = secret.read_bytes().strip()
    with team_of(launch, c10d(), "2:3", conf={"last_call_timeout": 0.1, "secret_file": secret}) as team:
        agents = team.start_many(2)
        first = team.wait_round(agents)
        key = Key(text, team.run_id)
        port = coordinator_port(team, first, key)
        refused = Knowledge(team.run_id, "no-token", ()).hello
        here = [record(HOST, port, key, message) for message in (refused, refused.replace(name="another"))]
        with team_of(launch, c10d(), "1:2", conf={"last_call_timeout": 0.1, "secret_file": secret}) as other:
            alone = other.wait_round(other.start_many(1))
            other_key = Key(text, other.run_id)
            there = record(HOST, coordinator_port(other, alone, other_key), other_key, refused)
            known = Knowledge(team.run_id, "0" * 32, [*here, there])
            ports = sorted(set().union(*(agent.ports() for agent in agents)) - store_ports(team, first))
            assert len(ports) >= 3, "the leader's, and those for votes"
            with ThreadPoolExecutor(64) as pool, ExitStack() as stack:
                for sock in half_open(HOST, ports, HALF_OPEN, here[0].frames[0]):
                    stack.enter_context(sock)
                stays = EFFORT != "quick"  # agents hang up on some after five seconds
                answers = list(pool.map(lambda seed: attack(seed, HOST, ports, known, stays=stays), range(SESSIONS)))
                assert {kind for kind, _ in answers} == {kind.__name__ for kind in KINDS}
                assert not [each for each in answers if b"Plan" in each[1] or b"Declined" in each[1]]
                first.send_signal(FAIL, 0)  # a real round among the half-open connections
                second = team.wait_round(agents, first)
            finish(other, alone)
        assert second.restart == 1 and len(second.starts) == 2
        assert [len(agent.starts) for agent in agents] == [2, 2], "no other round"
        finish(team, second)
        for agent in agents:
            assert not NEVER_LOGGED.search(agent.stderr), team.story
            refusals = re.findall("W refused 127.0.0.1: ", agent.stderr)
            assert len(refusals) <= 4, "one line per minute"
        assert sum("W refused 127.0.0.1: " in agent.stderr for agent in agents) >= 1


@pytest.mark.parametrize("store", ["static", pytest.param("endpoints", marks=pytest.mark.all)])
def test_agents_with_one_secret_meet_in_stores_of_their_own(launch: Launcher, secret: Path, store: str) -> None:
    """`test_cells.py` covers cells that are a single value of a store."""
    port = quiet_port()
    hosts = (1, 2, 3) if store == "endpoints" else (1,)
    endpoint = ",".join(f"127.0.0.{host}:{port}" for host in hosts)
    options = ("--max-restarts", "3", "--secret-file", str(secret))
    with team_of(launch, Meeting("c10d" if store == "endpoints" else store, endpoint), "2", options=options) as team:
        agents = [team.start("--node-rank", str(rank)) for rank in range(2)]
        first = team.wait_round(agents)
        first.send_signal(FAIL, 1)
        finish(team, team.wait_round(agents, first))


# In an agent: it soon logs what it is waiting for.
NOTES_OFTEN = "from aelastic.rdzv.member import search\nsearch.NOTE_INTERVAL_S = 1.0\n"
# Likewise: it does not wait for a secret that may be changing.
WITHOUT_PATIENCE = "from aelastic.rdzv.protocol import other_secret\nother_secret.SECRET_CHANGE_S = 0.5\n"


def test_a_node_with_another_secret_or_none_is_named_on_both_sides_and_the_job_continues(
    launch: Launcher, secret: Path, tmp_path: Path
) -> None:
    put(tmp_path / "other", secrets.token_hex(32))
    meeting = c10d()
    with team_of(launch, meeting, "1:2", conf={"last_call_timeout": 0.1}, wrapper=NOTES_OFTEN) as team:
        member = team.start("--secret-file", str(secret))
        first = team.wait_round([member])
        stranger = team.start("--secret-file", str(tmp_path / "other"))
        member.wait_logged(
            r"W refused 127\.0\.0\.1: it has a different secret \(key ....( and ....)? there, .... here in .*secret\)"
        )
        stranger.wait_logged(
            r"W refused 127\.0\.0\.1: it has a different secret \(key .... there, .... here in .*other\)"
        )
        assert stranger.wait() == EXIT_INPUT and not stranger.starts, stranger.story
        expected = r"its agents have a different secret \(key .... there, .... here in .*other\): use the same --secret-file on every node"
        assert re.search(expected, stranger.stderr), stranger.story
        without = team.start()
        assert without.wait() == EXIT_INPUT
        expected = "its agents have a secret and this one has none: use the same --secret-file on every node"
        assert expected in without.stderr and not without.starts, without.story
        # The doctor reports the leader's key.
        own = Key(secret.read_bytes().strip(), "").id[:4]
        for path, level, expected in (
            (secret, "ok", f"it has key {own}"),
            (tmp_path / "other", "error", f"written with another secret (key {own}; ours is"),
        ):
            settings = RendezvousSettings("c10d", meeting.endpoint, 1, 2, secret_file=str(path))
            found = anyio.run(findings, settings, team.run_id)
            (finding,) = [each for each in found if each.subject == "leader"]
            assert expected in finding.words and finding.level == level, found
        assert len(member.starts) == 1, "the job continued"
        # With two lines, one may be the job's future secret, so the agent waits for it for a while.
        changing = tmp_path / "changing"
        put(changing, secrets.token_hex(32), secrets.token_hex(32))
        late = team.start("--secret-file", str(changing), wrapper=WITHOUT_PATIENCE)
        assert late.wait() == EXIT_INPUT and not late.starts, late.story
        assert re.search(r"a different secret \(.*\) for \d+ s: use the same --secret-file on every node", late.stderr)
        newcomer = team.start("--secret-file", str(changing))
        newcomer.wait_logged(
            r"looking for the leader .*, which may be changing: waiting up to 120 s for this node to get it"
        )
        put(changing, secrets.token_hex(32), secret.read_text().strip())
        finish(team, team.wait_round([member, newcomer], first))


@pytest.mark.all
@pytest.mark.ci
def test_a_node_with_a_secret_is_refused_by_a_job_without_one_and_both_sides_report_it(
    launch: Launcher, secret: Path
) -> None:
    with team_of(launch, c10d(), "1:2", conf={"last_call_timeout": 0.1}) as team:
        member = team.start()
        round_ = team.wait_round([member])
        stranger = team.start("--secret-file", str(secret))
        assert stranger.wait() == EXIT_INPUT and not stranger.starts, stranger.story
        expected = "has a secret and the job has none: use the same --secret-file on every node, or none"
        assert f": its leader refused this agent: this agent {expected}" in stranger.stderr, stranger.story
        member.wait_logged(f"W refused 127.0.0.1: it {expected}")
        finish(team, round_)


async def findings(settings: RendezvousSettings, run_id: str) -> list[Finding]:
    return [each async for each in check_endpoints(settings, run_id, os.environ)]


# Agents that read a file's new lines long before the test's next step, which needs all of them to have done so.
WATCHFUL = """
from aelastic.rdzv.protocol import secret_file

secret_file.LOOK_INTERVAL_S = 0.1
"""


@pytest.mark.parametrize("count, first_kill", [(2, 2), pytest.param(4, 0, marks=pytest.mark.all)])
def test_a_secret_is_changed_while_the_job_runs_and_an_agent_is_killed_at_some_steps(
    launch: Launcher, tmp_path: Path, count: int, first_kill: int
) -> None:
    """Each node has its own file, and gets the new one before, while or after an agent is killed."""
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    files = [tmp_path / f"secret-{index}" for index in range(count)]
    for path in files:
        put(path, old)
    conf = {"last_call_timeout": 0.2, "settle_time": 0.1}
    nnodes, options = f"{count - 1}:{count}", ("--max-restarts", "0")
    with team_of(launch, c10d(), nnodes, conf=conf, options=options, wrapper=f"{HASTY}{WATCHFUL}") as team:
        agents = [team.start("--secret-file", str(path), "--node-rank", str(index)) for index, path in enumerate(files)]
        last = team.wait_round(agents)
        for step, lines in enumerate([(old, new), (new, old), (new,)]):
            for path in files[: count // 2]:
                put(path, *lines)
            victim = 1 + step % (count - 1)
            if step >= first_kill:
                agents[victim].crash()
                left = [agent for agent in agents if not agent.is_over]
                last = team.wait_round(left, last)
            for path in files[count // 2 :]:
                put(path, *lines)
            if step < first_kill:
                continue
            agents[victim] = team.start("--secret-file", str(files[victim]), "--node-rank", str(victim))
            last = team.wait_round(agents, last)
            assert last.restart == 0, "membership changes are free"
        finish(team, last)
        logged = [line for agent in team.agents for line in agent.stderr.splitlines()]
        assert not [line for line in logged if "refused" in line and "secret" in line], team.story


def _holds(pid: int, needle: bytes) -> str:
    """Where a process holds it: environment, command line or memory; empty if nowhere."""
    process = Path(f"/proc/{pid}")
    for name in ("environ", "cmdline"):
        if needle in (process / name).read_bytes():
            return name
    with (process / "mem").open("rb", buffering=0) as memory:
        for line in (process / "maps").read_text().splitlines():
            bounds, rights = line.split()[:2]
            if not rights.startswith("rw"):
                continue
            begin, end = (int(each, 16) for each in bounds.split("-"))
            with suppress(OSError):
                memory.seek(begin)
                if needle in (memory.read(end - begin) or b""):
                    return line
    return ""


def test_the_secret_is_in_no_environment_no_command_line_no_file_and_no_memory(
    launch: Launcher, secret: Path, tmp_path: Path
) -> None:
    text = secret.read_text().strip()
    logs = tmp_path / "logs"
    env = {"AELASTIC_SECRET_FILE": str(secret), "TORCHELASTIC_HEALTH_CHECK_PORT": "0"}
    options = ("--max-restarts", "1", "--log-dir", str(logs), "--preload", "json")
    with team_of(launch, c10d(), "2", env=env, options=options) as team:
        agents = team.start_many(2)
        first = team.wait_round(agents)
        first.send_signal(FAIL, 0)
        second = team.wait_round(agents, first)
        seen = 0
        for agent in agents:
            for pid in agent.left():
                with suppress(ProcessLookupError, FileNotFoundError):
                    assert not (where := _holds(pid, text.encode())), f"{where} of {pid}"
                    seen += 1
        assert seen >= 6, "two agents, their workers and their helpers"
        for pid in second.pids:
            assert b"SECRET_FILE" not in Path(f"/proc/{pid}/environ").read_bytes()
        finish(team, second)
        texts = [agent.stderr + agent.stdout for agent in agents]
        texts += [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file() and path != secret]
        assert len(texts) > 4 and not [each for each in texts if text in each]
