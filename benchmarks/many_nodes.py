"""Measures jobs of several nodes: several agents on this machine, against torchrun where that gets through.

    python benchmarks/many_nodes.py [--repeat 5] [--only form,kill] [--out FOLDER]

Where both launchers can do it they take turns (torchrun, aelastic, torchrun, …) in one run, and what counts is the
ratio of their medians.  Where torchrun never recovers it is not waited for; the report says what it does instead.
Workers import nothing and put time stamps into a FIFO (CLOCK_MONOTONIC, one clock for all).

The last rows are the rendezvous alone, of thousands of agents in one process over real sockets (`many_agents.py`).

Writes `<date>-many-nodes.json` (every single figure) and a readable `.md` of the same name.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cut_hosts
import lost_hosts
import named_hosts
from arguments import Arguments
from jobs import HERE, LIMIT_S, Job, SkippedError, etcd, free_port, open_job, store
from one_node import Launcher, Measure, MeasurementError, take_in_turn
from report import Figure, Report, Row, describe_machine, judge

SETTLE_S = 2.0  # a launcher starts helpers in its first moments; what a running job does is measured after them
LEASE_S = 5.0  # aelastic's default
COUNTS = (1000, 4000, 8000)
AGENTS_LIMIT_S = 300.0
GROWTH = 1.1  # what one of more agents may cost, as a multiple of one of fewer

# What torchrun 2.13 does instead, or its figure where its own is another measurement.
THEIRS = {
    "kill_s": "never",
    "talk_s": "43 to 49 s, or never",  # each in two of four tries, given 180 s
    "stop_s": "never",
    "join_s": "the job crashes",
    "leader_killed_s": "never",
    "leader_killed_etcd_s": "never",
    "leader_and_endpoint_s": "never",
    "leader_frozen_s": "never",
    "named_etcd_s": "never",
    "named_second_s": "never",
    "named_servers_s": "never",
    "named_c10d_s": "never",
    "first_of_two_s": "never",
    "first_of_three_s": "never",
    "power_s": "never",
    "first_100_s": "4.6 s (128 agents)",
    "again_100_s": "16 s (128 agents)",
}


# --- what is measured -------------------------------------------------------------------------------------------------


def measure_form(launcher: Launcher) -> dict[str, float]:
    with open_job(launcher, "4", max_restarts=3) as job:
        started_at = job.start(4)
        running_at = job.wait_running(4)
        time.sleep(SETTLE_S)
        victim = job.workers(4)[2]
        killed_at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        again_at = job.wait_running(4, after=killed_at)
    return {"form_s": running_at - started_at, "crash_s": again_at - killed_at}


def measure_blocked(launcher: Launcher) -> dict[str, float]:
    """A stopped worker stands for one that is blocked in C: SIGTERM ends neither."""
    with open_job(launcher, "2", max_restarts=3) as job:
        job.start(2)
        job.wait_running(2)
        time.sleep(SETTLE_S)
        blocked, victim = (job.workers(2)[rank] for rank in range(2))
        os.kill(blocked.pid, signal.SIGSTOP)
        killed_at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        return {"blocked_s": job.wait_running(2, after=killed_at) - killed_at}


def measure_fail(launcher: Launcher) -> dict[str, float]:
    with open_job(launcher, "3") as job:
        job.start(3)
        job.wait_running(3)
        time.sleep(SETTLE_S)
        killed_at = time.monotonic()
        os.kill(job.workers(3)[1].pid, signal.SIGKILL)
        for number, agent in enumerate(job.agents):
            try:
                agent.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise MeasurementError(f"agent {number} of {launcher.name} has not ended") from None
        return {"fail_s": time.monotonic() - killed_at}


def lose_a_node(job: Job, signum: int, *, coordinator: bool) -> float:
    """Seconds from the signal to one of three agents until the workers of the other two run."""
    job.start()
    job.wait_coordinating(job.agents[0])  # and on c10d it serves the store, if any agent does
    job.start(2)
    job.wait_running(3)
    time.sleep(SETTLE_S)
    victim = job.agents[0] if coordinator else job.agents[1]
    lost_at = victim.signal(signum)
    return job.wait_running(2, after=lost_at) - lost_at


def measure_kill(launcher: Launcher) -> dict[str, float]:
    with open_job(launcher, "1:3") as job:
        return {"kill_s": lose_a_node(job, signal.SIGKILL, coordinator=False)}


def measure_talk(*options: str, key: str) -> Callable[[Launcher], dict[str, float]]:
    """Workers that import torch and are in a collective all the time: those of the others fail when a node dies."""

    def measure(launcher: Launcher) -> dict[str, float]:
        with open_job(launcher, "1:3", max_restarts=3, worker="talking.py") as job:
            job.start(options=options)
            time.sleep(SETTLE_S)  # by then the first agent serves the store, with either launcher
            job.start(2, options=options)
            job.wait_running(3)
            time.sleep(SETTLE_S)
            lost_at = job.agents[1].kill_node()
            return {key: job.wait_running(2, after=lost_at) - lost_at}

    return measure


def measure_stop(launcher: Launcher) -> dict[str, float]:
    with open_job(launcher, "1:3") as job:
        return {"stop_s": lose_a_node(job, signal.SIGSTOP, coordinator=False)}


def measure_join(launcher: Launcher) -> dict[str, float]:
    with open_job(launcher, "2:4", conf="last_call_timeout=1") as job:
        job.start(2)
        job.wait_running(2)
        time.sleep(SETTLE_S)
        joined_at = job.start()
        return {"join_s": job.wait_running(3, after=joined_at) - joined_at}


def measure_leader_killed(launcher: Launcher) -> dict[str, float]:
    with store() as endpoint, open_job(launcher, "1:3", endpoint=endpoint, conf="is_host=false") as job:
        return {"leader_killed_s": lose_a_node(job, signal.SIGKILL, coordinator=True)}


def measure_leader_and_endpoint(launcher: Launcher) -> dict[str, float]:
    with open_job(launcher, "1:3") as job:
        return {"leader_and_endpoint_s": lose_a_node(job, signal.SIGKILL, coordinator=True)}


def measure_leader_killed_etcd(launcher: Launcher) -> dict[str, float]:
    with etcd() as endpoint, open_job(launcher, "1:3", backend="etcd-v3", endpoint=endpoint) as job:
        return {"leader_killed_etcd_s": lose_a_node(job, signal.SIGKILL, coordinator=True)}


def measure_form_on(hosts: int) -> Callable[[Launcher], dict[str, float]]:
    def measure(launcher: Launcher) -> dict[str, float]:
        with open_job(launcher, "3", endpoint=_endpoints(hosts)) as job:
            started_at = job.start(3)
            return {f"form_on_{hosts}_s": job.wait_running(3) - started_at}

    return measure


def _endpoints(hosts: int) -> str:
    port = free_port()
    return ",".join(f"127.0.0.{host}:{port}" for host in range(1, hosts + 1))


def measure_leader_frozen(launcher: Launcher) -> dict[str, float]:
    with store() as endpoint, open_job(launcher, "1:3", endpoint=endpoint, conf="is_host=false") as job:
        return {"leader_frozen_s": lose_a_node(job, signal.SIGSTOP, coordinator=True)}


def measure_agents(count: int) -> Callable[[Launcher], dict[str, float]]:
    def measure(_: Launcher) -> dict[str, float]:
        command = [sys.executable, str(HERE / "many_agents.py"), str(count)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=AGENTS_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"{count} agents are not done after {AGENTS_LIMIT_S:.0f} s") from None
        if done.returncode:
            error = MeasurementError(f"{count} agents: exit code {done.returncode}")
            error.add_note(done.stderr[-2000:])
            raise error
        figures = json.loads(done.stdout)
        found = {f"{key.removesuffix('_s')}_{count}_s": figures[key] for key in ("first_s", "first_cpu_s")}
        found[f"again_{count}_s"] = statistics.median(figures["again_s"])
        found[f"again_cpu_{count}_s"] = min(figures["again_cpu_s"])
        return found

    return measure


def agents_measure(count: int, first_target: float | None, again_target: float | None) -> Measure:
    figures = (
        Figure(f"first_{count}_s", f"{count:,} agents in one process: first round", "s", first_target, is_ratio=False),
        Figure(f"again_{count}_s", "the same: an agent fails → all in the next round", "s", again_target, False),
    )
    return Measure(f"agents-{count}", measure_agents(count), figures, max_repeats=3 if count <= 1000 else 2, warm_up=0)


def single(
    key: str, take: Callable[[Launcher], dict[str, float]], caption: str, target: float | None, max_repeats: int = 1000
) -> Measure:
    """A measure of one figure, in seconds, which only aelastic can be measured for."""
    figure = Figure(f"{key.replace('-', '_')}_s", caption, "s", target, is_ratio=False)
    return Measure(key, take, (figure,), max_repeats, warm_up=0)


BESIDE = "its worker has run beside a later round for"


def cut(key: str, caption: str, target: float | None = None, **ways: bool) -> Measure:
    """A measure of a cut: how soon the others continue, and for how long the old round runs beside theirs.

    After a cut of one way TCP may deliver one more sign of life: the lease begins with that.
    """
    name = key.replace("-", "_")
    figures = (
        Figure(f"{name}_s", f"{caption} → the others' workers running", "s", target, is_ratio=False),
        Figure(f"{name}_beside_s", f"the same: {BESIDE}", "s", cut_hosts.BESIDE_S, is_ratio=False),
    )
    return Measure(key, cut_hosts.measure_cut(name, **ways), figures, max_repeats=3, warm_up=0)


MEASURES = (
    Measure(
        "form",
        measure_form,
        (
            Figure("form_s", "4 agents, c10d: start → first lines of all workers", "s", 0.6),
            Figure("crash_s", "4 agents: a worker crashes → all workers running again", "s", 0.05),
        ),
    ),
    Measure(
        "blocked",
        measure_blocked,
        (Figure("blocked_s", "2 agents: a worker crashes, the other is blocked → both running again", "s", 0.1),),
        max_repeats=2,
        warm_up=0,
    ),
    single("fail", measure_fail, "3 agents, no restart left: a worker crashes → all agents have ended", 2.0),
    single("kill", measure_kill, "`1:3`: a node SIGKILLed → workers of the others running", 0.5),
    single(
        "talk",
        measure_talk(key="talk_s"),
        "the same, workers in `all_reduce`: → the others' are past their next `all_reduce`",
        1.5,
        5,
    ),
    single(
        "talk-warm", measure_talk("--preload", "torch", key="talk_warm_s"), "the same with `--preload torch`", None, 5
    ),
    single("stop", measure_stop, "`1:3`: a node SIGSTOPped → workers of the others running", LEASE_S + 1, 3),
    single("join", measure_join, "`2:4`: two nodes run, a third is started → workers of all three running", 1.5),
    single(
        "leader-killed",
        measure_leader_killed,
        "`1:3`: the coordinator's agent SIGKILLed, the c10d store lives → others running",
        0.5,
    ),
    single(
        "leader-and-endpoint",
        measure_leader_and_endpoint,
        "the same, and the c10d store dies with it → others running",
        0.5,
    ),
    single("leader-killed-etcd", measure_leader_killed_etcd, "the same on etcd-v3 → others running", 0.5, 3),
    single("leader-frozen", measure_leader_frozen, "the same on c10d, SIGSTOPped → others running", LEASE_S + 1, 3),
    single(
        "named-etcd",
        named_hosts.measure_etcd,
        "the same on etcd-v3, nodes and etcd by name, the name server silent, SIGKILLed",
        1.0,
    ),
    single("named-second", named_hosts.measure_second, "the same, of two name servers the first one silent", 1.0),
    single("named-servers", named_hosts.measure_servers, "the same, of two etcd servers the first one dead", 1.0),
    single("named-c10d", named_hosts.measure_c10d, "the same on c10d, whose store dies with it", 1.0),
    single(
        "first-of-two",
        lost_hosts.measure_first_host(2, "first_of_two_s"),
        "2 hosts: all processes of the one with leader and endpoint SIGKILLed → the other's worker running",
        0.5,
    ),
    single("first-of-three", lost_hosts.measure_first_host(3, "first_of_three_s"), "the same with 3 hosts", 4.6),
    single("power", lost_hosts.measure_power, "the same, and its network is gone with it", LEASE_S + 1, 3),
    single(
        "endpoint",
        lost_hosts.measure_endpoint,
        "3 hosts: nobody reaches the endpoint for 11 s, workers untouched; one crashes → all running again",
        0.5,
        3,
    ),
    single(
        "all-restarted",
        lost_hosts.measure_all_restarted,
        "3 hosts: all agents SIGKILLed and started again, that of the endpoint last → all running",
        LEASE_S + 1,
        3,
    ),
    single(
        "loss",
        lost_hosts.measure_loss,
        f"3 endpoints, {lost_hosts.LOST_PERCENT} % of packets lost: the leader's host SIGKILLed → others running",
        6.0,
        10,
    ),
    single(
        "most-endpoints",
        lost_hosts.measure_most_endpoints,
        "2 of 3 endpoints away for 60 s, workers untouched; one crashes, endpoints back → all running again",
        LEASE_S + 1,
        1,
    ),
    single("most-etcds", lost_hosts.measure_most_etcds, "the same with 2 of 3 etcd servers", LEASE_S + 1, 1),
    cut("cut", "3 hosts: one that does not lead is cut off", LEASE_S + 1),
    cut("cut-inbound", "the same, one way: it receives nothing", outbound=False),
    cut("cut-outbound", "the same, the other way: nothing of it gets out", inbound=False),
    single(
        "loss-30-beside",
        cut_hosts.measure_loss("loss_30_beside_s", 30, endpoints=1),
        f"30 % of packets lost, the leader's host cut off for 11 s: {BESIDE}",
        cut_hosts.BESIDE_S,
        3,
    ),
    single(
        "loss-50-beside",
        cut_hosts.measure_loss("loss_50_beside_s", 50, endpoints=3),
        f"3 endpoints, 50 % of packets lost: {BESIDE}",
        cut_hosts.BESIDE_S,
        3,
    ),
    single(
        "verdict-leader",
        cut_hosts.measure_verdict_leader,
        "3 hosts, no restart left: a worker crashes, the leader's host is SIGKILLed → the others have ended",
        2.0,
    ),
    single(
        "verdict-cut",
        cut_hosts.measure_verdict_cut,
        "the same, one host cut off: it is back → its agent has ended, the same code",
        LEASE_S + 1,
        3,
    ),
    single(
        "request",
        cut_hosts.measure_request,
        "3 hosts: a cordon is acknowledged, the leader's host SIGKILLed → the cordon is carried out, workers running",
        0.5,
    ),
    single(
        "place-rank",
        lost_hosts.measure_place_rank,
        "3 hosts, recovery in place: a rank SIGKILLed → all past their next `all_reduce`",
        0.15,
    ),
    single(
        "place-agent",
        lost_hosts.measure_place_agent(leader=False, key="place_agent_s"),
        "the same: all processes of a host SIGKILLed → the others past their next `all_reduce`",
        0.5,
    ),
    single(
        "place-leader",
        lost_hosts.measure_place_agent(leader=True, key="place_leader_s"),
        "the same: all processes of the leader's host SIGKILLed",
        0.5,
    ),
    single("form-on-1", measure_form_on(1), "3 agents, one endpoint: start → first lines of all workers", None),
    single("form-on-3", measure_form_on(3), "the same, three endpoints (at most 1.1 of that with one)", None),
    agents_measure(100, None, None),
    agents_measure(1000, 2.0, 1.0),
    agents_measure(4000, 4.3, 1.2),
    agents_measure(8000, None, None),
)
COMPARED = frozenset({"form", "blocked"})


# --- the report -------------------------------------------------------------------------------------------------------


def judge_growth(samples: dict[str, dict[str, list[float]]]) -> list[Row]:
    """How much more processor time more agents take, at best: what else runs on the machine slows all of it down."""
    rows = []
    for kind, what in (("first", "first round"), ("again", "the next round after a failure")):
        costs = {
            count: min(samples[key]["aelastic"]) for count in COUNTS if (key := f"{kind}_cpu_{count}_s") in samples
        }
        for few, many in zip(costs, list(costs)[1:], strict=False):
            growth, most = costs[many] / costs[few], GROWTH * many / few
            caption = f"{what}, {few:,} → {many:,} agents: processor time grows by"
            verdict = "ok" if growth <= most else "MISSED"
            rows.append(Row(caption, "", f"× {growth:.2f}", None, f"≤ × {most:.1f}", verdict))
    return rows


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    options = Arguments("Measure jobs of several nodes.", repeat=5, keys=[each.key for each in MEASURES]).read()
    torchrun = Launcher("torchrun", (str(Path(sys.executable).with_name("torchrun")),))
    aelastic = Launcher("aelastic", (sys.executable, "-m", "aelastic"))
    machine = describe_machine()
    samples: dict[str, dict[str, list[float]]] = {}
    rows: list[Row] = []
    is_complete = True
    for measure in MEASURES:
        if measure.key not in options.only:
            continue
        launchers = (torchrun, aelastic) if measure.key in COMPARED else (aelastic,)
        try:
            taken = take_in_turn(measure, launchers, min(options.repeat, measure.max_repeats))
        except SkippedError as reason:
            rows += [Row(figure.caption, "", "", None, "", f"skipped: {reason}") for figure in measure.figures]
            continue
        except MeasurementError as error:
            print(f"bench: {measure.key}: {error}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
            rows += [Row(figure.caption, "", "", None, "", f"FAILED: {error}") for figure in measure.figures]
            is_complete = False
            continue
        samples |= taken
        rows += [judge(figure, taken[figure.key], THEIRS.get(figure.key, "")) for figure in measure.figures]
    method = (
        f"Medians of at most {options.repeat} runs each, all agents on one machine; ratios are of "
        "torchrun and aelastic in turn. "
        "Where torchrun never gets over it, it was not waited for. Agents in one process are the rendezvous alone; "
        "torchrun's figures there are of 128 of its rendezvous handlers, measured once."
    )
    report = Report("Several nodes", method, machine)
    lines = report.compared(rows + judge_growth(samples))
    report.write(options.out, "many-nodes", lines, repeat=options.repeat, samples=samples)
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
