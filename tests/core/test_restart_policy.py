"""The decision after a round ends: stories (`stories/decisions/`), rule syntax, and what is proof or progress."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import decided
from kit.reports import Job
from kit.stories.coordinator import failure as killed
from kit.stories.coordinator import node
from kit.stories.decisions import raised

from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.failures.root_cause import root_of
from aelastic.rdzv.decisions.cause import Cause, CauseKind, Innocence
from aelastic.rdzv.decisions.decision import Decision, DecisionKind
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.coordinator_events import DeadlinePassed
from aelastic.rdzv.leader.roster import RoundRules
from aelastic.rdzv.ledger import NONE, UNKNOWN, Blamed, Ledger, Reached, Spent, most_of
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.restart_policy import End, RestartPolicy, cause_of, innocence
from aelastic.rdzv.restart_rules import (
    ACTIONS,
    CONDITIONS,
    DEFAULT,
    RULES_MAX,
    Condition,
    Rule,
    RuleError,
    error_patterns,
    parse,
    problem_of,
)
from aelastic.rdzv.single_node import SingleNode

NOTHING = Reached()


def decide(policy: RestartPolicy, *failures: ProcessFailure, reached: Reached = NOTHING, life_s: float = 1) -> Decision:
    """The decision after the last of several failures in a row."""
    ledger, count, now, decision = Ledger(), 0, 0.0, None
    for each in failures:
        assert decision is None or not decision.is_final, "the job is over"
        end = End(cause_of(each), each, count, ledger, reached.replace(life_s=life_s), now=now)
        decision = policy.decide(end)
        ledger, count, now = policy.after(end, decision), count + decision.is_charged, now + life_s
    assert decision is not None
    return decision


def ruled(text: str, max_restarts: int = 3) -> RestartPolicy:
    return RestartPolicy(max_restarts, parse(text), text)


# Syntax.


@pytest.mark.parametrize(
    "text, rule",
    [
        ("exit 42: stop", Rule("exit 42: stop", (Condition("exit", 42, 42),), "stop")),
        ("exit 40-49:stop", Rule("exit 40-49:stop", (Condition("exit", 40, 49),), "stop")),
        ("signal SEGV: ignore", Rule("signal SEGV: ignore", (Condition("signal", 11),), "ignore")),
        ("signal sigbus: stop", Rule("signal sigbus: stop", (Condition("signal", 7),), "stop")),
        ("error 'a; b: c': stop", Rule("error 'a; b: c': stop", (Condition("error", pattern="a; b: c"),), "stop")),
        ("oom, hang : restart", Rule("oom, hang : restart", (Condition("oom"), Condition("hang")), "restart")),
        ("same-error any: stop", Rule("same-error any: stop", (Condition("same-error", pattern="any"),), "stop")),
        ("no-progress 3: stop", Rule("no-progress 3: stop", (Condition("no-progress", 3),), "stop")),
        ("*: restart 5/1h", Rule("*: restart 5/1h", (Condition("*"),), "restart", 5, 3600.0)),
        ("*: restart after 2s", Rule("*: restart after 2s", (Condition("*"),), "restart", after=(2.0, 2.0))),
        (
            "*:  restart 9/90s after 500ms..1.5m # a comment",
            Rule("*: restart 9/90s after 500ms..1.5m", (Condition("*"),), "restart", 9, 90.0, (0.5, 90.0)),
        ),
    ],
)  # fmt: skip
def test_a_rule_is_read(text: str, rule: Rule) -> None:
    assert parse(text) == (rule,)


def test_rules_are_in_one_line_or_in_several() -> None:
    lines = "# what a file may have\nexit 3: stop\n\n*: restart   # the rest\n"
    assert [rule.text for rule in parse(lines)] == ["exit 3: stop", "*: restart"]
    assert [rule.text for rule in parse("exit 3: stop; *: restart;")] == ["exit 3: stop", "*: restart"]
    assert parse("drained: ignore; same-error: stop; *: restart") == DEFAULT


@pytest.mark.parametrize(
    "text, where",
    [
        ("", "column 1: there is no rule"),
        ("# nothing", "column 1: there is no rule"),
        ("exitt 3: stop", f"column 1: 'exitt' is not a condition: use one of {', '.join(CONDITIONS)}"),
        ("exit 3: stopp", f"column 9: 'stopp' is not an action: use one of {', '.join(ACTIONS)}"),
        ("exit 3 stop", "column 8: a colon and an action should follow"),
        ("exit: stop", "column 5: exit needs a code from 1 to 255"),
        ("exit 0: stop", "column 6: exit needs a code"),
        ("exit 9-3: stop", "column 6: exit needs a code"),
        ("exit 3:", "column 8: there is not an action here"),
        ("exit 3,: stop", "column 8: there is not a condition here"),
        ("signal X: stop", "column 8: signal needs a name"),
        ("error [: stop", "column 7: '[' is not a regular expression"),
        ("error: stop", "column 6: error needs a regular expression"),
        ("error 'a: stop", "column 7: the quotation mark is not closed"),
        ("no-progress 0: stop", "column 13: no-progress needs a number from 1 to 100"),
        ("*: restart 5", "column 12: '5' is not a budget"),
        ("*: restart 5/1", "column 12: '5/1' is not a budget"),
        ("*: restart 0/1h", "column 12: '0/1h' is not a budget"),
        ("*: restart 5/1h later", "column 17: 'later' follows 'restart'"),
        ("*: restart after", "column 17: after needs times up to 1h"),
        ("*: restart after 9s..1s", "column 18: after needs times"),
        ("*: restart after 2h", "column 18: after needs times"),
        ("*: stop now", "column 9: 'now' follows an action: end the rule with ';'"),
        ("drained: restart", "column 1: a drain is not charged"),
        ("node-lost: elsewhere", "column 1: the node is gone"),
        ("'*': stop", "column 1: '*' is not a condition"),
        ("exit 3: stop\n*: go", "line 2, column 4: 'go' is not an action"),
        (";".join(["*: stop"] * (RULES_MAX + 1)), f"column {8 * RULES_MAX + 1}: there are more than {RULES_MAX} rules"),
        ("*: stop" + " " * 9000, "column 8193: the rules are longer"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_named_with_its_column_and_the_words_allowed(text: str, where: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text)
    assert str(caught.value).startswith(where), caught.value


WORDS = ["exit", "signal", "SEGV", "error", "oom", "same-error", "any", "restart", "5/1h", "after", "1s..5m", "3", "*"]


@given(st.lists(st.sampled_from([*WORDS, ":", ",", ";", "\n", "'", '"', "#", "stop", "ignore", "[", "ä"]), max_size=12))
def test_whatever_is_written_is_rules_or_has_a_column(words: list[str]) -> None:
    text = " ".join(words)
    if problem := problem_of(text):
        assert "column " in problem
    else:
        assert all(parse(rule.text) == (rule,) for rule in parse(text)), "a rule's text is the rule"


def test_an_error_rule_holds_for_failures_that_their_nodes_found_to_match_it() -> None:
    rules = "error ECC: stop; exit 3, error NVLink, error ECC: ignore; *: restart"
    assert error_patterns(parse(rules)) == {"ECC": [0, 1], "NVLink": [1]}
    matched = {places: decide(ruled(rules, 5), raised().replace(matched_rules=places)) for places in ((), (0, 1), (1,))}
    assert matched[()].is_charged and matched[0, 1].is_final
    assert matched[1,].kind is DecisionKind.RESTART_FREE, "the coordinator does not run the search"


# Proof.


@pytest.mark.parametrize(
    "failure, root",
    [
        (raised(), "KeyError at /job/train.py:40"),
        (raised("NameError: name 'x' is not defined"), "NameError at /job/train.py:40"),
        (raised("my.module.Broken: at step 3"), "Broken at /job/train.py:40"),
        (raised("AssertionError"), "AssertionError at /job/train.py:40"),
        (raised("ValueError: the CUDA device is odd"), ""),
        (raised("RuntimeError: NCCL communicator was aborted"), ""),
        (raised("RuntimeError: [gloo] connection closed by peer"), ""),
        (raised("FileNotFoundError: [Errno 2] No such file"), ""),
        (raised("ModuleNotFoundError: No module named 'x'"), ""),
        (raised("torch.OutOfMemoryError: Tried to allocate 2 GiB"), ""),
        (raised("torch.distributed.DistBackendError: timeout"), ""),
        (raised("requests.exceptions.ReadTimeout: slow"), ""),
        (raised(before="ConnectionResetError: [Errno 104] reset"), ""),  # the KeyError follows from it
        (raised(exitcode=-11), ""),
        (raised(oom="the kernel killed it"), ""),
        (raised(found_by="hang"), ""),
        (killed("a"), ""),
    ],
)
def test_what_ended_a_worker_can_be_proof_if_the_world_has_no_part_in_it(failure: ProcessFailure, root: str) -> None:
    assert root_of(failure) == root


def test_a_complaint_about_options_is_the_cause() -> None:
    stderr = "usage: train.py [-h]\n                [--lr LR]\ntrain.py: error: unrecognized arguments: --rl\n"
    failure = ProcessFailure(0, 1, 2, "", stderr_tail=stderr)
    assert failure.message == "usage error: train.py: error: unrecognized arguments: --rl"
    assert decide(RestartPolicy(3), failure, failure).is_final
    assert ProcessFailure(0, 1, 3, "", stderr_tail=stderr).message == "exited with code 3"


def died(code: str) -> ProcessFailure:
    """The failure of a worker whose script raises an exception."""
    try:
        exec(compile(code, "/job/train.py", "exec"), {})
    except Exception as error:  # noqa: BLE001  any kind
        below = error.__traceback__ and error.__traceback__.tb_next  # this frame
        text = "".join(traceback.format_exception(error.with_traceback(below)))
        return ProcessFailure(0, 1, 1, "", stderr_tail=text)
    raise AssertionError("it did not end")


@pytest.mark.parametrize(
    "code",
    [
        "nobody",
        "[][0]",
        "None.step",
        "len(3)",
        "def f():\n    x += 1\nf()",
        "exec('if 1:\\nx')",
        "import json\njson.dumps({1: 2}, indent={})",  # below a library
        "try:\n    [][0]\nexcept IndexError as e:\n    raise KeyError(1) from e",
    ],
)
def test_a_script_that_only_a_change_helps_is_stopped_the_second_time(code: str) -> None:
    assert decide(RestartPolicy(3), died(code), died(code)).is_final


@pytest.mark.parametrize("code", ["assert False", "raise RuntimeError('odd')", "class E(Exception): ...\nraise E('x')"])
def test_what_may_heal_has_the_whole_budget(code: str) -> None:
    assert decide(RestartPolicy(3), *[died(code)] * 4).kind is DecisionKind.RESTARTS_SPENT


@pytest.mark.parametrize(
    "code",
    [
        "open('away/data')",
        "import os\nos.listdir('away')",
        "import not_yet_installed",
        "import socket\nwith socket.create_server(('127.0.0.1', 0)) as s:\n    socket.create_server(s.getsockname())",
        "import socket\nwith socket.socket() as s:\n    s.bind(('127.0.0.1', 0)); socket.create_connection(s.getsockname())",
        "raise ConnectionResetError(104, 'Connection reset by peer')",
        "raise TimeoutError('the store does not answer')",
        "raise MemoryError('a neighbour has it')",
        "raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')",
        "class OutOfMemoryError(RuntimeError): ...\nraise OutOfMemoryError('2 GiB')",
        "class DistNetworkError(RuntimeError): ...\nraise DistNetworkError('no store at 29500')",
        "class DistBackendError(RuntimeError): ...\nraise DistBackendError('NCCL timeout')",
        "raise RuntimeError('[gloo/transport/tcp/pair.cc:589] connection closed')",
        "try:\n    open('away/cfg')\nexcept OSError:\n    {}['lr']",
        "try:\n    open('away/cfg')\nexcept OSError as e:\n    raise TypeError('no configuration') from e",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/hub')",
        "raise PermissionError(13, 'the mount is not there yet')",
        "raise EOFError('the file is half-written')",
    ],
)
def test_what_heals_by_itself_is_never_proof(code: str) -> None:
    assert not decide(ruled("same-error any: stop; *: restart", 5), *[died(code)] * 5).is_final


@pytest.mark.parametrize(
    "known, reached, is_complete, has_advanced",
    [
        (Ledger(), Reached(), True, False),
        (Ledger(), Reached(life_s=60.0), True, True),
        (Ledger(), Reached(step=0), True, True),
        (Ledger(step=9), Reached(step=10), True, True),
        (Ledger(step=9), Reached(step=9, calls=99, life_s=600.0), True, False),
        (Ledger(step=9), Reached(life_s=600.0), True, False),  # it did not get that far again
        (Ledger(step=9), Reached(life_s=600.0), False, None),  # the node that reports steps has not yet
        (Ledger(step=9), Reached(step=UNKNOWN), True, None),
        (Ledger(), Reached(calls=3), True, True),
        (Ledger(calls=3), Reached(calls=4), True, True),
        (Ledger(calls=3), Reached(calls=3, life_s=600.0), True, False),
        (Ledger(calls=3), Reached(calls=2), True, None),  # it may have resumed from a checkpoint
        (Ledger(calls=3), Reached(calls=3), False, None),
    ],
)
def test_progress_is_known_or_it_is_not(
    known: Ledger, reached: Reached, is_complete: bool, has_advanced: bool | None
) -> None:
    assert known.advance(reached, is_complete=is_complete) is has_advanced


def test_what_is_not_known_changes_nothing() -> None:
    ledger = Ledger("root", 9, NONE, 2)
    assert ledger.after("root", Reached(step=UNKNOWN), is_complete=True) == ledger
    assert ledger.after("root", Reached(step=10), is_complete=True) == Ledger("root", 10, NONE, 0)
    assert ledger.after("root", Reached(step=1), is_complete=True) == Ledger("root", 9, NONE, 3)
    assert most_of().step == most_of(Reached(3), Reached(UNKNOWN)).step == UNKNOWN
    assert most_of(Reached(3), None, Reached(NONE, 7, 2.0)) == Reached(3, 7, 2.0)


def test_what_is_free_stays_so_unless_a_rule_names_it() -> None:
    loss = decided.lost("n", "silent for 5 s")
    lost = End(loss.cause)
    assert RestartPolicy(0).decide(lost) == ruled("*: stop").decide(lost) == loss
    assert ruled("node-lost: stop").decide(lost).is_final
    assert ruled("node-lost: restart").decide(lost).is_charged
    assert not ruled("node-lost: stop").decide(End(decided.left("n", "SIGTERM").cause)).is_final
    drain = decided.drain("n", 60.0, "spot")
    assert RestartPolicy(3).after_drain(drain) is None and ruled("drained: ignore").after_drain(drain) is None
    stop = ruled("drained: stop").after_drain(drain)
    assert stop is not None and (stop.kind, stop.rule) == (DecisionKind.STOPPED_BY_RULE, "drained: stop")


# In the coordinator.


def job(policy: RestartPolicy, names: str = "ab") -> Job:
    found = Job(Coordinator(RoundRules(1, len(names)), policy))
    for name in names:
        found.handle(m.Ready(node(name)), 100.0)
    return found


def fails(job: Job, name: str, at: float, reached: Reached | None = NOTHING) -> list[Any]:
    sent = job.handle(m.Failed(name, job.core.round, raised(), 0.0, reached), at)
    sent += job.handle(DeadlinePassed(), at + 0.4)
    return [each.message for each in sent]


def ready(job: Job, names: str, at: float, reached: Reached = NOTHING) -> list[Any]:
    return [each.message for name in names for each in job.handle(m.Ready(node(name), reached), at)]


def test_a_new_leader_knows_what_was_before() -> None:
    first = job(ruled("same-error: stop; *: restart 9/1h"))
    fails(first, "a", 101.0, Reached(7))
    ready(first, "ab", 161.0, Reached(7))
    kept = first.core.state(171.0)
    assert kept.ledger == Ledger("KeyError at /job/train.py:40", 7, NONE, 0, (Spent(1, 10.0),))
    other = Job(Coordinator(RoundRules(1, 2), first.core.policy))
    other.core.resume(kept, [], 500.0)
    for name in "ab":
        other.connect(node(name), m.Past(m.NodePhase.BUSY, 2), 500.0)
    assert other.core.forming.cordons.ledger.spent == (Spent(1, 490.0),)
    fails(other, "a", 501.0, Reached(7))
    ready(other, "ab", 502.0, Reached(7))
    assert other.core.verdict is not None and other.core.verdict.decision.kind is DecisionKind.SAME_ERROR


# Excluded hosts.


def asks(job: Job, verb: r.Verb, target: str, at: float, reason: str = "") -> list[Any]:
    return [each.message for each in job.handle(r.Ask("b", f"{verb}{at}", verb, target, 0.0, reason), at)]


def test_a_new_leader_knows_which_hosts_are_cordoned() -> None:
    first = job(RestartPolicy(3), "abc")
    asks(first, r.Verb.CORDON, "a", 102.0, "fans")
    ready(first, "abc", 103.0)
    other = Job(Coordinator(RoundRules(1, 3), first.core.policy))
    other.core.resume(first.core.state(113.0), [], 500.0)
    for name in "bc":
        other.connect(node(name), m.Past(m.NodePhase.BUSY, 2), 500.0)
    assert ready(other, "a", 501.0) == [r.Cordoned("fans", 3600.0 - 12.0, 1)]


def test_where_too_many_are_without_a_seat_the_cause_is_another() -> None:
    policy, ledger = ruled("*: elsewhere"), Ledger().exclude("g", "x", 0.0)
    failure = raised()
    end = End(cause_of(failure), failure, ledger=ledger, now=5.0, nodes=16)
    kept = policy.decide(end)
    assert (kept.kind, kept.cordoned) == (DecisionKind.RESTART, "")
    assert (kept.kept, kept.absent, kept.nodes) == ("h", 1, 16), "one host of 16 is excluded already"
    assert policy.decide(end.replace(nodes=20)).cordoned == policy.decide(end.replace(now=3601.0)).cordoned == "h"
    decision = policy.decide(end.replace(nodes=20))
    assert policy.after(end, decision).absent(5.0).keys() == {"g", "h"}


def test_a_host_that_comes_back_too_often_stays_away_for_longer() -> None:
    ledger, lengths = Ledger(), []
    for times in range(7):
        ledger = ledger.exclude("h", "x", 100_000.0 * times)
        lengths.append(ledger.absent(100_000.0 * times)["h"].for_s / 3600)
        ledger = ledger.exclude("other", "x", 100_000.0 * times)
    assert lengths[:2] == [1.0, 1.0] and max(lengths) <= 24, "old failures are forgotten"
    ledger = Ledger()
    for times in range(7):
        ledger = ledger.exclude("h", "x", 60.0 * times)
    assert [each.for_s / 3600 for each in ledger.excluded] == [1, 2, 4, 8, 16, 24, 24]


def test_a_job_of_one_node_keeps_it() -> None:
    for core in (Job(Coordinator(RoundRules(1, 1), RestartPolicy(3))), SingleNode(RestartPolicy(3))):
        core.handle(m.Ready(node("b")), 0.0)
        ask = r.Ask("b", "x", r.Verb.CORDON, "b", 0.0, "")
        assert [getattr(each, "message", each) for each in core.handle(ask, 1.0)] == [r.Answer("x", False, r.ONE_NODE)]


# Blamed hosts.


@pytest.mark.parametrize(
    "failure, why",
    [
        (raised(), Innocence.ERROR),
        (raised(found_by="the progress watch", exitcode=-9), Innocence.HANG),
        (raised("MemoryError"), Innocence.MEMORY),
        (raised("RuntimeError: Connection reset by peer"), Innocence.LOST_CONNECTION),
        (raised("x", exitcode=-9), Innocence.SIGNAL),
        (raised("x", exitcode=-11), None),
        (raised("x", exitcode=-7), None),
    ],
)
def test_only_what_proves_something_of_a_host_is_held_against_it(
    failure: ProcessFailure, why: Innocence | None
) -> None:
    assert innocence(failure) is why
    ledger, policy = Ledger(), RestartPolicy(9)
    for now in range(3):
        end = End(cause_of(failure), failure, 0, ledger, now=float(now), nodes=4, hosts=4)
        decision = policy.decide(end)
        ledger = policy.after(end, decision)
    assert (decision.cordoned == "h") is (not why)


def test_a_host_is_not_blamed_where_all_are_on_it_or_nothing_is_known_of_it() -> None:
    failure = killed("a")
    missing = Cause(CauseKind.NODES_MISSING, ranks=(1,), is_loss=True)
    for cause, died in ((cause_of(failure), failure), (missing, None)):
        ledger, policy = Ledger(blamed=(Blamed("host-a", 0.0), Blamed("", 0.0))), RestartPolicy(9)
        end = End(cause, died, 0, ledger, now=1.0, hosts=1 if died else 4)
        assert not policy.decide(end).cordoned and not policy.after(end, policy.decide(end)).excluded


def test_a_new_leader_blames_the_host_of_the_leader_that_is_gone() -> None:
    first = Job(Coordinator(RoundRules(1, 3), RestartPolicy(9), "a"))
    ready(first, "abc", 100.0)
    other = Job(Coordinator(RoundRules(1, 3), first.core.policy))
    other.core.resume(first.core.state(100.0), ["a"], 500.0)
    for name in "bc":
        other.connect(node(name), m.Past(m.NodePhase.BUSY, 1), 500.0)
    ready(other, "bc", 502.0)
    assert other.core.round == 2
    assert [each.host for each in other.core.forming.cordons.ledger.blamed] == ["host-a"]
