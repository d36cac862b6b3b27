"""Which ranks hang: places are compared, and stacks are folded into places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.diagnose.failures.places import Place, compare
from aelastic.diagnose.stacks.format import Frame, Thread
from aelastic.diagnose.stacks.places import place_of
from aelastic.rdzv.protocol.codec import UPWARD, Decoder, encode
from aelastic.rdzv.protocol.messages import Node, NodePhase, Past, Saw, Status

C10D = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def waiting(rank: int, name: str = "all_reduce", line: int = 120, steps: int = -1) -> Place:
    at = f"train.py:{line}"
    return Place(rank, f"n{rank // 4}", 100 + rank, at, f"{name} ({at})", name, "S", steps)


def elsewhere(rank: int, function: str = "read", at: str = "dataset.py:88", state: str = "D") -> Place:
    return Place(rank, f"n{rank // 4}", 100 + rank, at, f"{function} ({at})", state=state)


def test_the_rank_that_does_not_come_is_named_and_where_it_is() -> None:
    found = compare([elsewhere(5), *(waiting(rank) for rank in (0, 1, 2, 3, 4, 6, 7))], 62.0)
    assert found.outliers == (5,)
    assert found.text == (
        "hang: 7 of 8 ranks wait in all_reduce (train.py:120) for 62 s; rank 5 on n1 does not: read (dataset.py:88), "
        "waits for a disk (D)"
    )


def test_several_ranks_that_do_not_come_are_named_as_far_as_a_line_has_room() -> None:
    found = compare([*(elsewhere(rank) for rank in range(6)), *(waiting(rank) for rank in range(6, 16))])
    assert found.outliers == tuple(range(6))
    assert found.text.count("does not: ") == 4
    assert found.text.endswith("; 2 more do not")


def test_one_rank_in_another_branchs_collective_is_an_outlier() -> None:
    found = compare([*(waiting(rank) for rank in range(3)), waiting(3, "barrier", 80)])
    assert found.outliers == (3,)
    assert "rank 3 on n0 does not: barrier (train.py:80)" in found.text


@pytest.mark.parametrize(
    "places",
    [
        [waiting(0), waiting(1), waiting(2, "barrier", 80), waiting(3, "barrier", 80)],
        [waiting(rank) for rank in range(4)],
        [waiting(0), elsewhere(1), elsewhere(2, at="a.py:1"), elsewhere(3, at="b.py:2")],
        [waiting(0), waiting(1), waiting(2), Place(3, "n0", 0, unknown="no answer from its agent")],
        [waiting(0), waiting(1), waiting(2, "barrier", 80), Place(3, "n0", 0, unknown="no answer from its agent")],
        [],
    ],
    ids=[
        "two halves",
        "all at one place",
        "most elsewhere",
        "one unknown",
        "an unknown one may be with the other",
        "none",
    ],
)
def test_what_cannot_be_decided_is_reported_with_the_groups(places: list[Place]) -> None:
    found = compare(places, 60.0)
    assert found.outliers == ()
    assert found.text.startswith("hang for 60 s: cannot tell which rank the others wait for; ")
    assert all(place.group in found.text for place in places)


def test_a_rank_that_is_seen_elsewhere_is_named_though_another_is_unknown() -> None:
    unknown = Place(3, "n0", 0, unknown="no answer from its agent")
    assert compare([waiting(0), waiting(1), elsewhere(2), unknown]).outliers == (2,)


def test_where_places_tell_nothing_fewer_steps_do() -> None:
    places = [waiting(0, steps=9), waiting(1, steps=9), waiting(2, steps=8), waiting(3, steps=9)]
    found = compare(places)
    assert found.outliers == (2,)
    assert found.text.endswith("rank 2 on n0 has done 8 steps, the others 9: all_reduce (train.py:120), sleeps")
    assert compare([places[0], places[2].replace(rank=3)]).outliers == ()


def test_a_rank_that_has_ended_is_waited_for() -> None:
    found = compare([waiting(0), waiting(1), Place(2, "n0", 7, ended="has ended")])
    assert found.outliers == (2,)
    assert found.text.endswith("rank 2 on n0 does not: has ended")


def folded(*frames: Frame) -> Place:
    return place_of(Place(0, "n0", 7), [Thread("MainThread", frames, is_main=True)])


def test_a_stack_in_a_collective_is_at_the_users_call_of_it() -> None:
    place = folded(
        Frame(C10D, 3252, "all_reduce"),
        Frame(C10D.replace("distributed_c10d", "c10d_logger"), 83, "wrapper"),
        Frame("/home/me/train.py", 120, "main"),
        Frame("/home/me/train.py", 150, "<module>"),
    )
    assert (place.at, place.collective, place.group) == ("train.py:120", "all_reduce", "all_reduce (train.py:120)")


DDP = "/usr/lib/python3.11/site-packages/torch/nn/parallel/distributed.py"
OF_DDP = Frame(DDP, 1782, "_pre_forward"), Frame(DDP, 1886, "forward"), Frame("/home/me/train.py", 120, "main")


def test_a_broadcast_of_ddp_is_a_collective_and_the_forward_pass_of_its_module_is_none() -> None:
    waits = folded(Frame(DDP, 2363, "_distributed_broadcast_coalesced"), *OF_DDP)
    assert waits.group == "_distributed_broadcast_coalesced (train.py:120)"
    computes = folded(Frame("/home/me/model.py", 7, "forward"), *OF_DDP)
    assert (computes.collective, computes.group) == ("", "forward (model.py:7)")


def test_a_rank_that_has_saved_for_a_drain_waits_and_the_one_that_does_not_come_is_an_outlier() -> None:
    has_saved = folded(
        Frame("/x/aelastic/training/notice/page.py", 72, "saved"), Frame("/home/me/train.py", 20, "<module>")
    )
    assert has_saved.group == "saved (train.py:20)"
    reads = folded(Frame("/home/me/data.py", 30, "read")).replace(rank=1)
    assert compare([has_saved, reads], 60.0).outliers == (1,)


@given(st.text(), st.text(), st.text(), st.integers(-1, 10**15))
def test_a_place_is_read_by_other_nodes_whatever_a_script_calls_its_files_and_functions(
    file: str, function: str, unknown: str, steps: int
) -> None:
    long = folded(Frame(300 * file, 7, 300 * function)).replace(steps=steps, unknown=300 * unknown)
    for place in (long, long.replace(ended=function, collective=300 * function)):
        status = Status(
            Node("n0", "host", "", 1, "", 29500), Past(NodePhase.READY), places=Saw("n0", 3, (place.for_others,))
        )
        (read,) = Decoder(UPWARD).feed(encode(status))
        assert isinstance(read, Status) and read.places is not None and read.places.places[0].steps == steps


BACKWARD = Frame("/x/site-packages/torch/autograd/graph.py", 829, "_engine_run_backward")
LINE = Frame("/home/me/train.py", 130, "step")


@pytest.mark.parametrize("state, collective", [("lock", "backward"), ("S", "backward"), ("R", ""), ("D", "")])
def test_who_waits_in_a_backward_pass_waits_in_its_collectives(state: str, collective: str) -> None:
    place = place_of(Place(0, "n0", 7, state=state), [Thread("MainThread", (BACKWARD, LINE), is_main=True)])
    assert (place.at, place.collective) == ("train.py:130", collective)


def test_of_a_backward_pass_the_threads_are_looked_at() -> None:
    hooks = Thread("pt_autograd_0", (Frame(C10D, 7, "all_gather_into_tensor"), Frame("/x/fsdp.py", 1, "hook")))
    others = [Thread("pin_memory", (LINE,)), hooks]
    place = place_of(Place(0, "n0", 7, state="lock"), [Thread("MainThread", (BACKWARD, LINE), is_main=True), *others])
    assert place.group == "all_gather_into_tensor (train.py:130)"
    beside = place_of(Place(0, "n0", 7, state="lock"), [Thread("MainThread", (LINE,), is_main=True), *others])
    assert beside.collective == "", "a user's own thread does not affect the main one"


def test_what_was_only_requested_is_not_called_a_hang() -> None:
    assert compare([waiting(0), waiting(1)], 62.0).text.startswith("hang for 62 s: cannot tell")
    assert compare([waiting(0), waiting(1)], 0.1).text.startswith("hang: cannot tell")
    assert compare([waiting(0), waiting(1)]).text.startswith("ranks compared: cannot tell")
    one = Place(1, "n0", 7, at="a.py:3", call="f (a.py:3)", state="S")
    assert compare([waiting(0), one], 7.0).text.startswith("hang: 1 of 2 ranks waits in all_reduce")


def test_what_is_unknown_still_has_the_kernels_word() -> None:
    unseen = Place(1, "n1", 8, unknown="no answer in time", state="D")
    assert unseen.sentence == "unknown (no answer in time), waits for a disk (D)"


def test_of_collectives_within_each_other_the_users_is_named() -> None:
    place = folded(Frame(C10D, 10, "all_gather"), Frame(C10D, 20, "all_gather_object"), Frame("/me/a.py", 3, "f"))
    assert place.collective == "all_gather_object"


def test_a_stack_elsewhere_has_the_innermost_call_and_the_users_line() -> None:
    place = folded(Frame("/usr/lib/python3.12/queue.py", 171, "get"), Frame("/home/me/data.py", 30, "load"))
    assert (place.call, place.collective) == ("get (data.py:30)", "")


def test_a_stack_without_a_frame_is_unknown() -> None:
    assert folded().unknown == "no Python frame"
