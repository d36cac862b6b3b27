"""Worst-case faults: an adversary that looks ahead, and every fault at every step of a job with two nodes."""

from __future__ import annotations

import random
from pathlib import Path as FilePath

import pytest
from kit.effort import ATTACKS, EVERYWHERE_S
from kit.simulated.adversary import ENDPOINTS, Fault, Path, attack, end, everywhere, of_two, size_of
from kit.simulated.checks import BrokenPromiseError, ForgottenError
from kit.simulated.simulation import Size
from kit.stories.coordinator import played
from kit.stories.files import Story, read

from aelastic.rdzv.leader.forming import Forming

pytestmark = pytest.mark.timeout(60.0 + 5 * ATTACKS + 200 * EVERYWHERE_S)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_attack_breaks_a_promise(endpoint: str) -> None:
    for seed in range(ATTACKS):
        attack(seed, endpoint)


def test_each_fault_at_each_step_of_a_job_of_two_is_survived() -> None:
    size = Size(nodes=2, max_nodes=2, is_endpoint_on_node0=True)
    found = [(at, fault) for at, fault, is_kept in everywhere(size, of_two(), EVERYWHERE_S) if not is_kept]
    assert found == [], "\n".join(str(Path(0, size, (each,))) for each in found[:3])


def test_a_victim_is_named_where_the_culprits_node_is_switched_off_before_it_could_tell() -> None:
    size = Size(nodes=3, min_nodes=3, max_nodes=3, max_restarts=3)
    failed_at, off_at = 2.3695, 2.3742
    Path(35000216, size, ((failed_at, Fault("fail", "node1")), (off_at, Fault("dark", "node1")))).run()


def test_a_failure_ends_the_job_where_nobody_learns_in_time_that_a_connection_broke_after_it() -> None:
    size = Size(nodes=3, min_nodes=3, max_nodes=3, max_restarts=0)
    failed_at, broke_at = 4.389656491175515, 4.5368
    Path(44000074, size, ((failed_at, Fault("fail", "node2")), (broke_at, Fault("break", "node2")))).run()


def test_nodes_follow_a_coordinator_that_displaces_a_new_job_once_it_reaches_the_endpoint() -> None:
    size = Size(max_restarts=0, is_endpoint_on_node0=True)
    coordinator_cut_at, endpoint_lost_at, other_cut_at = 2.5246197555396686, 2.5577603811504104, 2.563061892590515
    faults = (
        (coordinator_cut_at, Fault("cut one way", "node1", "node0", 12.0)),
        (endpoint_lost_at, Fault("crash", "node0", "node1", 0.3)),
        (other_cut_at, Fault("cut one way", "node2", "endpoint", 7.0)),
    )
    Path(45000310, size, faults).run()


# The endpoint's host is lost, and the other nodes elect a leader.  A new agent there founds a job of its own, and can't
# reach that leader, which displaces it as a worker fails.
DISPLACED = Path(
    48000013,
    Size(min_nodes=1, max_restarts=1, is_endpoint_on_node0=True),
    (
        (2.2827826780189446, Fault("crash", "node0", seconds=0.3)),
        (3.721800726171381, Fault("reset", "node1", "node0", 12.0)),
        (4.510673967478402, Fault("fail", "node2")),
    ),
)
DISPLACED_WITH_ANOTHER = Path(
    1,
    Size(nodes=5, max_nodes=5, max_restarts=3, is_endpoint_on_node0=True),
    (
        (2.0, Fault("crash", "node4", seconds=2.6)),
        (4.3, Fault("crash", "node0", seconds=0.3)),
        *((4.4, Fault("reset", f"node{side}", other, 20.0)) for side in (1, 2, 3) for other in ("node0", "node4")),
        (6.72, Fault("fail", "node2")),
    ),
)


@pytest.mark.parametrize("path", [DISPLACED, DISPLACED_WITH_ANOTHER])
def test_the_round_of_a_new_job_ends_once_the_leader_of_the_other_nodes_has_displaced_it(path: Path) -> None:
    """Its fence is the higher one."""
    path.run()


def test_a_leader_that_does_not_give_up_its_log_to_a_newer_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aelastic.rdzv.log.leader.must_give_up_log", lambda *_, **__: False)
    with pytest.raises(BrokenPromiseError, match=r"has run round .* beside round .*, which is newer"):
        attack(414, "node0")


# When its host comes back, the endpoint is silent for 2 s: the new leader's question is lost, and times out a lease
# later.
NOT_DISPLACED_FOR_LONG = Path(
    50002145,
    Size(min_nodes=1, max_restarts=1, is_endpoint_on_node0=True),
    (
        (3.1771554604625565, Fault("crash", "node0", seconds=0.3)),
        (3.545084532208802, Fault("endpoint down", "node2", seconds=2.0)),
    ),
)


def test_a_new_job_is_displaced_once_the_leader_of_the_other_nodes_asks_the_endpoint_again() -> None:
    NOT_DISPLACED_FOR_LONG.run()


def test_votes_that_are_counted_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aelastic.rdzv.log.votes.is_more_than_half", lambda *_: True)
    with pytest.raises(BrokenPromiseError, match=r"is committed, and .* know that"):
        attack(6, "c10d")


def test_a_failure_is_charged_where_only_a_coordinator_that_was_replaced_knew_of_a_break_beside_it() -> None:
    size = Size(max_restarts=3, has_etcd=True)
    failed_at, broke_at = 6.590706729040672, 6.594267521343865
    faults = (
        (1.317698336126417, Fault("endpoint down", "node0", "node1", 7.0)),
        (failed_at, Fault("fail", "node1")),
        (broke_at, Fault("break", "node0")),
    )
    Path(44001509, size, faults).run()


def test_a_failure_may_be_charged_where_its_coordinator_told_so_and_was_switched_off_unnoticed() -> None:
    size = Size(nodes=2, min_nodes=2, max_nodes=2, max_restarts=1, has_etcd=True)
    failed_at, off_at = 1.228540777345286, 1.2971757253767662
    faults = ((failed_at, Fault("fail", "node1")), (off_at, Fault("dark", "node0", seconds=0.3)))
    Path(46000198, size, faults).run()


def test_a_failure_may_be_charged_where_its_coordinator_stood_still_as_another_node_left() -> None:
    size = Size(nodes=2, min_nodes=2, max_nodes=2, max_restarts=1, has_etcd=True)
    failed_at, frozen_at, left_at = 2.611893489675947, 2.6177178593812513, 2.621439599619279
    faults = (
        (failed_at, Fault("fail", "node0")),
        (frozen_at, Fault("freeze", "node0", seconds=0.3)),
        (left_at, Fault("leave", "node1", seconds=0.3)),
    )
    Path(48001350, size, faults).run()


def test_a_victim_is_named_where_a_node_leaves_before_it_learns_that_its_connection_broke() -> None:
    size = Size(nodes=2, min_nodes=2, max_nodes=2)
    broke_at, left_at = 3.9263456382799813, 4.165436448074513
    faults = ((broke_at, Fault("break", "node1")), (left_at, Fault("leave", "node1", seconds=0.3)))
    Path(48001493, size, faults).run()


@pytest.mark.parametrize(
    "path",
    [
        Path(
            50000741,
            Size(max_nodes=2, max_restarts=0, endpoints=3),
            (
                (3.605110504402603, Fault("cut one way", "node1", "node0", 12.0)),
                (8.7644956359032, Fault("isolate", "node2", "endpoint", 2.0)),
                (8.765896916944211, Fault("freeze", "node1", seconds=2.0)),
                (14.638320245580786, Fault("fail", "node2")),
            ),
        ),
        Path(
            50001441,
            Size(nodes=2, max_nodes=2, max_restarts=0, has_etcd=True),
            (
                (2.720850625484418, Fault("isolate", "node0", "", 0.5)),
                (10.717656062083355, Fault("reset", "node0", "node1", 12.0)),
                (17.509266928597544, Fault("fail", "node0")),
            ),
        ),
    ],
    ids=["three endpoints", "etcd"],
)
def test_a_node_that_was_lost_in_an_earlier_round_reads_on_the_endpoint_how_the_job_ended(path: Path) -> None:
    end(path.played())


def test_a_run_is_over_where_a_job_begins_after_another_that_left_no_trace_though_more_was_to_fail() -> None:
    """The endpoint is lost with its host, and comes back empty once the other nodes' job has failed."""
    size = Size(nodes=3, min_nodes=1, max_nodes=3, max_restarts=0, is_endpoint_on_node0=True)
    gone_at, failed_at, begins_again_at = 2.5, 10.0, 8.5
    faults = (
        (2.4, Fault("cut", "node0", "node1", 30.0)),
        (2.4, Fault("cut", "node0", "node2", 30.0)),
        (gone_at, Fault("crash", "node0", seconds=begins_again_at - gone_at)),
        (failed_at, Fault("fail", "node1")),
        (14.0, Fault("freeze", "node0", seconds=0.3)),
    )
    path = Path(2, size, faults)
    path.run()
    with pytest.raises(ForgottenError):
        path.played()


def test_an_attack_can_be_played_again_and_shrunk() -> None:
    path = attack(3, "c10d")
    path.run()  # in the original order
    assert eval(repr(path)) == path and len(path.faults) >= 2

    class Broken(Path):
        def fails(self) -> str:
            return "broken" if any(fault.kind == "leave" for _, fault in self.faults) else ""

    needed = (1.0, Fault("leave", "node0"))
    broken = Broken(1, Size(), ((0.5, Fault("break", "node1")), needed, (2.0, Fault("freeze", "node0", "", 2.0))))
    assert broken.shrunk().faults == (needed,)


def story_in(folder: FilePath, text: str) -> Story:
    path = folder / "found.txt"
    path.write_text(f"What an adversary found.\n\n{text}\n")
    (story,) = read(path)
    return story


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_story_of_a_run_is_one_that_the_cores_tests_can_hold(tmp_path: FilePath, endpoint: str) -> None:
    faults = (1.5, Fault("fail", "node0")), (2.5, Fault("crash", "node1", seconds=2.0))
    story = story_in(tmp_path, Path(3, size_of(random.Random(endpoint), endpoint), faults).story)
    assert played(story) == list(story.lines)
    assert any(" -> closed, round" in line for line in story.lines)


def test_a_bug_is_found_shrunk_and_told_as_a_story(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Forming._settle

    def forget_to_charge(forming: Forming, now: float) -> object:
        count, step = forming.restart_count, settle(forming, now)
        forming.restart_count = count
        return step

    monkeypatch.setattr(Forming, "_settle", forget_to_charge)
    with pytest.raises(AssertionError) as caught:
        attack(7, "etcd")
    (note,) = caught.value.__notes__
    text, _, path = note.partition("\n\n")
    story = story_in(tmp_path, text)
    assert len(path.splitlines()) == 2, "one fault, and how to replay it"
    assert played(story) == list(story.lines), "with the bug"
    monkeypatch.undo()
    assert played(story) != list(story.lines), "without the bug it diverges"


def test_a_promise_that_breaks_in_a_copy_is_found_and_told_with_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(job: object) -> None:
        raise AssertionError("it does not agree")

    monkeypatch.setattr("kit.simulated.adversary.end", crash)
    with pytest.raises(AssertionError, match="it does not agree") as caught:
        attack(0, "etcd")
    (note,) = caught.value.__notes__
    assert note.splitlines()[-1].startswith("replay: PYTHONPATH=tests python -m kit.simulated.adversary --replay '{")
    _, _, is_kept = next(iter(everywhere(Size(nodes=2, max_nodes=2), of_two(), 0.1)))
    assert not is_kept
