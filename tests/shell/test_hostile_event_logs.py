"""Any content of event logs and of files that agents leave: readers report their findings, or a one-line error."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.hostile_input import GARBAGE, LONG_EXAMPLES, hostile, mutated
from kit.stories.event_logs import a_crash
from kit.stories.spent_logs import Job
from kit.verbs import verb

from aelastic.base.host import control_sockets
from aelastic.cli.timeline import main as timeline
from aelastic.errors import InputError

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings(LONG_EXAMPLES)]

FIRST, SECOND = a_crash()
LONG = next(job.logs for job in map(Job, range(100)) if 20 < sum(len(log.lines) for log in job.logs) < 200)
RECORDS = [json.loads(line) for log in (FIRST, SECOND, *LONG) for line in log.lines]
KINDS = sorted({record["event"] for record in RECORDS})
LINES = [json.dumps(record).encode() for record in RECORDS]


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """An event log with some lines of a real one, a few of which are hostile."""
    lines = list(draw(st.sampled_from([FIRST.lines, SECOND.lines, LONG[0].lines])))
    usual = {key: json.loads(lines[0])[key] for key in ("run_id", "node", "host")}
    for _ in range(draw(st.integers(1, 4))):
        kind, place = draw(st.integers(0, 9)), draw(st.integers(0, len(lines)))
        if kind < 8:
            name = draw(st.sampled_from(KINDS))
            record = draw(st.sampled_from([each for each in RECORDS if each["event"] == name]))
            of_this = usual if draw(st.integers(0, 3)) else {}
            line = json.dumps(draw(mutated({**record, **of_this}))).encode()
        elif kind == 8:
            line = draw(GARBAGE)
        else:
            del lines[place : place + draw(st.integers(1, 9))]
            continue
        lines[place : place + draw(st.integers(0, 1))] = [line + b"\n"]
    whole = b"".join(lines)
    return whole if draw(st.integers(0, 4)) else whole[: draw(st.integers(0, len(whole)))]


READERS = ("why", "-n", "9"), ("why", "--json"), ("spent",), ("spent", "--json", "--cost", "2/h"), ("policy", "explain")


def test_what_reads_event_logs_bears_any(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "events.jsonl"

    @hostile
    @given(logs(), st.sampled_from(READERS))
    def read(data: bytes, reader: tuple[str, ...]) -> None:
        path.write_bytes(data)
        options = list(reader)
        options.insert(2 if reader[0] == "policy" else 1, str(folder))
        with contextlib.suppress(InputError):  # the command line's one-line error
            output = verb(tmp_path, *options)
            assert output.code in {0, 2}, output
            assert output.code == 0 or (output.err.startswith("aelastic: error: ") and output.err.count("\n") == 0), (
                output
            )
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
            code = timeline([str(folder)])
        assert code == 0 or (code == 2 and err.getvalue().count("\n") == 1), err.getvalue()

    read()


def test_readers_bear_anything_where_agents_have_left_their_records(tmp_path: Path) -> None:
    run = {"run_id": "job", "node_id": "n", "host": "h"}
    end = {
        "after_s": 3.5,
        "otherwise": "",
        "at": "x",
        "generation": 1,
        "reason": "r",
        "failure": None,
        "step": 3,
        "blame": None,
        "symptom": "",
        "again_s": 1.0,
    }
    left: Any = {
        "time": "2026-11-29T08:00:00+00:00",
        "reason": "r",
        "run": run,
        "state": "FAILED",
        "phase": "done",
        "why": [end],
    }
    folder = control_sockets.folder_of({"XDG_RUNTIME_DIR": str(tmp_path)})
    control_sockets.listen_at(folder, "n").close()
    control_sockets.close(folder, "n", left)
    path = folder / "n.ended"
    assert path.exists()

    @hostile
    @given(mutated(left) | GARBAGE, st.sampled_from(["why", "status", "ps", "stop"]), st.booleans())
    def read(content: Any, what: str, is_json: bool) -> None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        output = verb(tmp_path, what, *["--json"] * is_json)
        assert output.code in {0, 3} and "Traceback" not in output.out + output.err, output

    read()
