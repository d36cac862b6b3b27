"""Reports of failed jobs as text: what is known about each worker, and the report made from it.

A line gives the values of a rank's `ProcessFailure`, as JSON; `recorded` is the message in its error file, `file` is the
content of that file, and `elsewhere` is a report from another node.  `raised 3: …` is a worker that raised and was stopped;
`stopped: 1 2` are other stopped workers.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
from pathlib import Path
from typing import Any

from aelastic.errors import ChildFailedError, ProcessFailure
from kit.stories.files import Story
from kit.stories.recorded import TRACEBACK, record_text

FATAL = 'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "t.py", line 4 in f\n'
TEXTS = {"TRACEBACK": TRACEBACK, "FATAL": FATAL}


def failure_of(rank: int, folder: Path, fields: dict[str, Any]) -> ProcessFailure:
    fields = {name: TEXTS.get(value, value) if isinstance(value, str) else value for name, value in fields.items()}
    if "elsewhere" in fields:
        return ProcessFailure.from_elsewhere(*fields["elsewhere"], **fields.get("more", {}))
    path = folder / f"{rank}.json"
    recorded, content = fields.pop("recorded", ""), fields.pop("file", "")
    if recorded:
        content = record_text(message=recorded, timestamp=str(fields.pop("timestamp", 1000)))
    if content:
        path.write_text(content)
    local_rank, exitcode = fields.pop("local_rank", rank), fields.pop("exitcode", 1)
    return ProcessFailure(local_rank, 100 + rank, exitcode, str(path), **fields)


def played(story: Story) -> list[str]:
    """A story's lines, with the present report."""
    lines = [line for line in story.lines if line and not line.startswith("  ")]
    failures, raised, stopped = dict[int, ProcessFailure](), dict[int, ProcessFailure](), dict[int, str]()
    with tempfile.TemporaryDirectory() as folder:
        for line in lines:
            before, _, rest = line.partition(": ")
            if before == "stopped":
                stopped = dict.fromkeys(map(int, rest.split()), "SIGTERM")
                continue
            group = raised if before.startswith("raised ") else failures
            rank = int(before.split()[-1])
            group[rank] = failure_of(rank, Path(folder), json.loads(rest))
        error = ChildFailedError("train.py", failures, stopped, raised=raised)
        report = str(error)
        assert str(pickle.loads(pickle.dumps(error))) == report
    assert all(10 < len(line) <= 60 for line in report.split("\n") if line and not line.strip("=-")), "borders"
    report = re.sub(r"^([=-])\1+$", r"\1\1\1", report, flags=re.MULTILINE)
    report = report.replace(folder, "FOLDER").replace(os.uname().nodename, "HOST")
    report = re.sub(r"  time      : \S+", "  time      : TIME", report)
    return lines + [f"  {line}".rstrip() for line in report.strip("\n").split("\n")]
