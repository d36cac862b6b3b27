"""The picture, the page around it, and the trace, as text."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from kit.stories.event_logs import NodeLog, a_crash, a_node_lost, a_start
from kit.stories.timelines import (
    HOSTILE,
    Elements,
    boxes_of,
    changed,
    cold_and_warm,
    data_of,
    logs_of,
    many_restarts,
    story_of,
)

from aelastic.observe.run_events import Compared, Killed, Noticed, StacksTaken, StopAsked, Waited
from aelastic.tools.timeline.chart import NODES_MAX, chart_of
from aelastic.tools.timeline.html import CARDS_MAX, page, summary
from aelastic.tools.timeline.merge import timeline_from
from aelastic.tools.timeline.perfetto import trace
from aelastic.tools.timeline.text import duration

# The page.


def test_the_picture_has_a_block_for_each_phase_and_each_life() -> None:
    data = data_of(page(story_of(*a_crash())))

    assert [box["name"] for box in boxes_of(data, "phase")].count("run") == 4
    assert len(boxes_of(data, "phase", "detect")) == 1
    assert len(boxes_of(data, "life")) == 8
    (failed,) = boxes_of(data, "life", "failed")
    assert (failed["rank"], failed["generation"]) == (2, 1)
    assert (failed["s"], failed["e"]) == pytest.approx((1.2, 10.0), abs=1e-5)
    marks = [mark["kind"] for node in data["nodes"] for mark in node["marks"]]
    assert marks.count("failure") == len(data["restarts"]) == 1


def test_a_restart_has_a_table_of_what_it_cost() -> None:
    text = page(story_of(*a_crash()))
    card = re.sub(r"<[^>]+>", "|", text[text.index('data-restart="1"') :])
    words = [word for word in card.split("|") if word.strip()]

    assert {"Restart 1", "300 ms", "rank 2 on node-b: RuntimeError: loss is NaN"} <= set(words)
    row = words[words.index("node-b") : words.index("node-b") + 7]
    assert row == ["node-b", "10 ms", "100 ms", "10 ms", "80 ms", "100 ms", "300 ms"]
    row = words[words.index("node-a") : words.index("node-a") + 7]
    assert row == ["node-a", "20 ms", "80 ms", "–", "100 ms", "50 ms", "250 ms"]


def test_starts_differ_in_look_and_in_words_and_a_restart_shows_when_its_first_output_came() -> None:
    story = story_of(cold_and_warm())
    text = page(story)

    starts = boxes_of(data_of(text), "start")
    assert [box["classes"] for box in starts] == ["start cold", "start warm", "start cold", "start warm"]
    spans = [box[name] for box in starts for name in "se"]
    assert spans == pytest.approx([1.1, 6.0, 10.35, 10.5, 1.1, 6.5, 10.35, 10.6])
    assert {attrs["class"] for attrs in Elements(text).of("dot")} >= {"dot warm", "dot cold"}  # in the legend
    words = "rank 1 · generation 1 · cold start\nprocess group 5.4 s after all workers were started"
    assert words in [box["words"] for box in starts]
    assert "first output 500 ms after the crash (warm start)" in text
    assert '<td><i class="dot warm"></i>500 ms warm</td>' in text
    lengths = {event["name"]: event["dur"] for event in trace(story)["traceEvents"] if event.get("cat") == "start"}
    assert lengths == {"cold start": 5_400_000, "warm start": 250_000}  # the last of each

    assert "warm" not in re.sub(r"<style>.*?</style>", "", page(story_of(*a_crash())), flags=re.DOTALL)


def test_the_page_needs_nothing_else() -> None:
    text = page(story_of(*a_crash()))

    assert not re.search(r"\b(src|href)=(?!\"data:)", text)
    assert not re.search(r"@import|url\(|//[a-z]", text.replace("http://www.w3.org/2000/svg", ""))
    assert "default-src 'none'" in text


def test_what_comes_from_a_log_is_never_markup() -> None:
    a, b = a_crash(HOSTILE)
    stranger = NodeLog(HOSTILE, begins=3.0)
    text = page(story_of(a, b, stranger))
    elements = Elements(text)

    assert [tag for tag, _ in elements.found].count("script") == 2  # the data, which is not a script, and ours
    assert data_of(text)["nodes"][0]["name"].startswith("node") and "<" in boxes_of(data_of(text), "failed")[0]["words"]
    assert {name for _, attrs in elements.found for name in attrs if name.startswith("on")} == set()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800-\udfff]", text)
    text.encode()


def test_a_log_that_breaks_off_reports_it() -> None:
    data, text = data_of(page(story_of(*a_node_lost()))), page(story_of(a_crash()[0]))

    guessed = [box for box in boxes_of(data) if box["e"] > box.get("known", box["e"])]
    assert len(guessed) == 3  # until a round forms without them
    assert 'class="badge succeeded"' in text  # the log that exists is complete
    assert "still running or cut off" in page(story_of(*a_node_lost()[1:2]))


def test_the_page_shows_what_ran() -> None:
    # A script may have the name of an interpreter.
    a = a_start()
    a.lines[0] = changed(a.lines[0], entrypoint="tools/python_bench.py")

    assert " · python_bench.py</p>" in page(story_of(a))
    assert " · train.py</p>" in page(story_of(a_start()))


UUID = "d268d1eb-b69b-476c-a2a5-3df6c4073566"


@pytest.mark.parametrize(
    "run_id, entrypoint, name, other",
    [
        (UUID, "src/train.py", "train.py", UUID),
        (UUID, "", UUID, None),
        ("job-17", "src/train.py", "job-17", "train.py"),
        ("d268d1eb", "train.py", "d268d1eb", "train.py"),
    ],
)
def test_a_run_without_an_id_of_the_users_is_called_by_its_script(
    run_id: str, entrypoint: str, name: str, other: str | None
) -> None:
    text = page(dataclasses.replace(story_of(*a_crash()), run_id=run_id, entrypoint=entrypoint))
    assert f"<title>{name}: timeline</title>" in text and f"<h1>{name}<span" in text
    assert (other is not None) == (re.search(rf" · {re.escape(str(other))}</p>", text) is not None)


@pytest.mark.parametrize(
    "dead, alive, words",
    [
        ((0, 1), (), "cut off"), ((), (0, 1), "still running"), ((0,), (1,), "still running"),
        ((0,), (), "still running or cut off"), ((), (), "still running or cut off"),
    ],
)  # fmt: skip
def test_the_badge_shows_what_is_known_of_a_log_that_breaks_off(
    dead: tuple[int, ...], alive: tuple[int, ...], words: str
) -> None:
    logs = logs_of(a_start("node-a"), a_start("node-b"))
    for place in dead:
        logs[place].is_dead = True
    for place in alive:
        logs[place].alive_at = logs[place].last_wall + 5

    assert f'<span class="badge ">{words}</span>' in page(timeline_from(logs))


def test_no_shares_are_stated_where_the_log_ends_with_the_start() -> None:
    text, lived = page(story_of(a_start())), a_start()
    lived.alive(60.023)

    text_ = "training: unknown, the log ends at 23 ms, when the workers had just started"
    assert summary(story_of(a_start())) == text_
    assert text_.capitalize() in text and "at least 23 ms" in text
    assert not re.search(r"\d %", text) and "data-spent" not in text
    assert summary(story_of(lived)) == "1 min 00 s: trained 99.96 %, starting 0.04 %"
    assert "data-spent" in page(story_of(lived))


def test_the_bar_of_shares_is_full_also_of_a_short_run() -> None:
    a = a_start()
    a.succeeds(0.4, ends=0.41)

    bar = re.search(r'<div class="bar">(.*?)</div>', page(story_of(a)))

    assert bar is not None
    shares = [float(share) for share in re.findall(r"flex:([0-9.]+) 0 0", bar[1])]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=0.01)


def test_the_marks_that_occur_are_explained() -> None:
    a = a_start()
    a.add(1.0, StacksTaken(1, "asked", {0: "py-spy"}, "/logs/stacks"))
    a.add(1.1, Noticed(1, 1, 1, "output", "silent for 60 s", is_stopped=False))
    a.add(1.1, Compared(1, "hang: 1 of 2 ranks waits in barrier (a.py:3); rank 1 on n1 does not: sleeps", (1,)))
    a.add(1.2, StopAsked(15))
    a.add(1.3, Killed(1, (0,), "not ended after 30 s"))
    a.add(1.4, Waited("1 of 2 nodes"))
    a.succeeds(2.0, ends=2.1)

    assert chart_of(story_of(a)).marks == (
        ("!", "noticed"), ("≠", "ranks compared"), ("†", "SIGKILL"), ("≡", "stacks taken"), ("…", "nodes missing"),
        ("■", "asked to stop"),
    )  # fmt: skip
    text = page(story_of(*a_crash()))
    assert "<em>Marks</em><span><b>⊗</b>failure</span></div>" in text  # and no other marks
    assert "<em>Marks</em>" not in page(story_of(a_start()))


def many_nodes(count: int, failing: int = -1) -> list[NodeLog]:
    nodes = [NodeLog(f"node-{place:02d}", workers=8) for place in range(count)]
    for place, node in enumerate(nodes):
        node.formed(1.0, 1, place, nodes=count)
        node.started(1.1)
        if place == failing:
            node.fails(8.0, 3, "boom", known_at=8.1)
        else:
            node.succeeds(9.0, ends=9.5)
    return nodes


def test_more_workers_than_fit_share_a_row_for_each_node() -> None:
    chart = chart_of(story_of(*many_nodes(33, failing=5)))

    assert "share a row" in chart.notes[0]
    assert len(boxes_of(chart.data, "life")) == 33
    assert len(boxes_of(chart.data, "life", "failed")) == 1
    assert [node["ranks"] for node in chart.data["nodes"]] == [["8 workers"]] * 33
    assert [mark["row"] for mark in chart.data["nodes"][5]["marks"]] == [0]


def test_64_ranks_have_rows_and_names_of_their_own() -> None:
    chart = chart_of(story_of(*many_nodes(8)))

    assert [len(node["workers"]) for node in chart.data["nodes"]] == [8] * 8
    assert chart.data["rows"]["worker"] >= 8  # pixels
    assert [words for node in chart.data["nodes"] for words in node["ranks"]] == [f"rank {rank}" for rank in range(64)]
    assert not chart.notes


def test_nodes_beyond_a_screenful_of_screens_are_left_out() -> None:
    chart = chart_of(story_of(*[NodeLog(f"node-{place}") for place in range(NODES_MAX + 3)]))

    assert "3 more nodes are not drawn." in chart.notes
    assert len(chart.data["nodes"]) == NODES_MAX


def test_too_many_blocks_become_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    story = story_of(many_restarts(60, workers=8))
    whole = chart_of(story)
    monkeypatch.setattr("aelastic.tools.timeline.boxes.BLOCKS_MAX", 300)
    folded = chart_of(story)

    assert len(boxes_of(whole.data)) == 60 * (8 + 5) + 8 + 4
    assert len(boxes_of(folded.data)) <= 300
    assert any("are drawn as one" in note for note in folded.notes) and not whole.notes
    # Training takes up most of a stretch with many short phases.
    assert len(boxes_of(folded.data, "folded", "run")) > 0 == len(boxes_of(folded.data, "folded", "stop"))


def test_of_many_restarts_the_longest_have_tables_and_all_are_listed() -> None:
    text = page(story_of(many_restarts(50)))

    cards = [int(number) for number in re.findall(r'data-restart="(\d+)"', text)]
    assert cards == list(range(51 - CARDS_MAX, 51))
    assert "failure 0<" in text and "All restarts" in text


def test_a_run_of_no_length_has_a_page() -> None:
    a = NodeLog("node-a")
    del a.lines[1:]

    text = page(story_of(a))

    assert "still running or cut off" in text and "nan" not in text


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0, "0"), (0.0000123, "0.012 ms"), (0.00042, "0.42 ms"), (0.01, "10 ms"), (0.0483, "48.3 ms"), (0.9994, "999 ms"),
        (0.9996, "1 s"), (3.34, "3.34 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"), (86399, "1 d 0 h"), (387000, "4 d 11 h"),
    ],
)  # fmt: skip
def test_lengths_of_time_are_written_as_people_write_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


# The trace.


def events(story: Any, phase: str) -> Iterator[dict[str, Any]]:
    return (event for event in trace(story)["traceEvents"] if event["ph"] == phase)


def test_a_trace_has_a_process_for_each_node_a_thread_for_each_rank_a_failure_and_what_each_node_spent() -> None:
    story = story_of(*a_crash())
    named = [event for event in events(story, "M") if "name" in event["args"]]
    names = {(event["pid"], event["tid"], event["name"]): event["args"]["name"] for event in named}
    (failure,) = [event for event in events(story, "i") if event["cat"] == "failure"]
    (restart,) = [event for event in events(story, "X") if event["cat"] == "restart"]

    assert names == {
        (0, 0, "process_name"): "job job", (0, 0, "thread_name"): "restarts",
        (1, 0, "process_name"): "node-a", (1, 0, "thread_name"): "agent 77",
        (1, 1, "thread_name"): "local rank 0 (rank 0)", (1, 2, "thread_name"): "local rank 1 (rank 1)",
        (2, 0, "process_name"): "node-b", (2, 0, "thread_name"): "agent 77",
        (2, 1, "thread_name"): "local rank 0 (rank 2)", (2, 2, "thread_name"): "local rank 1 (rank 3)",
    }  # fmt: skip
    assert failure["name"] == "rank 2 failed: RuntimeError: loss is NaN"
    assert (failure["pid"], failure["tid"], failure["ts"]) == (2, 1, pytest.approx(10_000_000, abs=2))
    assert restart["args"]["spent_s"]["node-b"] == pytest.approx(
        {"detect": 0.01, "stop": 0.1, "await": 0.01, "rendezvous": 0.08, "spawn": 0.1}, abs=1e-5
    )


@pytest.mark.parametrize("nodes", [a_crash(), a_crash(HOSTILE), a_node_lost(), (many_restarts(30),)])
def test_a_trace_has_the_form_that_perfetto_reads(nodes: tuple[NodeLog, ...]) -> None:
    text = json.dumps(trace(story_of(*nodes)))
    document = json.loads(text)

    assert document["displayTimeUnit"] == "ms"
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in document["traceEvents"]:
        assert event["ph"] in {"X", "i", "M"} and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert isinstance(event["ts"], int) and isinstance(event["dur"], int)
            assert event["ts"] >= 0 and event["dur"] >= 0
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "i":
            assert event["s"] == "t" and isinstance(event["ts"], int)
    # Spans on one thread follow each other: viewers draw overlapping spans wrongly unless one contains the other.
    for each in spans.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(each)))
