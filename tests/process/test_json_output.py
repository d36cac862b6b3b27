"""`--json` of each reporting command: one document on stdout, the usual exit code, and the documented fields."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.launching import Launcher, ran
from kit.verbs import json_of, verb
from kit.waiting import wait_for

from aelastic.base.renamed import RENAMED
from aelastic.cli.main import main
from aelastic.cli.manual.table import COMMANDS
from aelastic.tools.rehearse.noted import Habit

PAGE = Path(__file__).parents[2] / "docs/reference/json.md"
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \|", re.MULTILINE)
WITHOUT = {"help"}  # shows a text for people


def fields_of(command: str) -> set[str]:
    """The fields that the page lists for a successful command."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    command = f"{command} {COMMANDS[command].subcommand}".rstrip()
    (section,) = [each for each in sections if f"`aelastic {command}`" in each.splitlines()[0]]
    return {field for names in ROW.findall(section) for field in re.findall(r"\w+", names)}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    code = main(argv)
    output = capsys.readouterr()
    found: dict[str, Any] = json.loads(output.out)
    return code, found, output.err


def test_each_command_that_reports_has_json_and_a_section_of_the_page() -> None:
    having = {name for name, each in COMMANDS.items() if any("--json" in arg.names for arg in each.arguments)}
    assert having == COMMANDS.keys() - WITHOUT
    for name in having:
        assert {"code"} <= fields_of(name), name


def test_commands_about_a_job_print_the_fields_of_the_page(launch: Launcher) -> None:
    job = launch("print('a line', flush=True)\nrest()", "--nproc-per-node=1", "--rdzv-id=resnet", "--redirects=1")
    wait_for(
        lambda: f"it runs: {job.story}",
        lambda: json_of(job.folder, "status").get("nodes", [{}])[0].get("phase") == "running",
    )
    for argv in (("ps",), ("status",), ("why",), ("stacks",), ("logs", "0")):
        document = json_of(job.folder, *argv)
        assert document.keys() <= fields_of(argv[0]) and document["code"] == "ok", (argv, document)
    page = json_of(job.folder, "status")["nodes"][0].keys()
    assert {"run", "phase", "round", "workers", "progress", "spent"} <= page
    refused = verb(job.folder, "drain", "--json")
    assert refused.code == 1
    document = json.loads(refused.out)
    assert document["code"] == "refused" and document.keys() <= fields_of("drain")
    both = verb(job.folder, "logs", "0", "--follow", "--json")
    assert both.code == 2 and json.loads(both.out)["code"] == "usage" and "use one of the two" in both.err
    stopped = json_of(job.folder, "stop", "resnet", "--wait")
    assert stopped["code"] == "ok" and stopped.keys() <= fields_of("stop")
    job.wait()  # the job is over before its agent has exited
    assert json_of(job.folder, "ps")["code"] == "no-such-job"


def test_commands_about_a_run_that_is_over_print_the_fields_of_the_page(
    launch: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    job = launch("sys.exit(7)", "--log-dir", "logs", "--max-restarts=1", "--restart-policy", "*: restart")
    assert job.wait() == 7, job.story
    logs = str(job.folder / "logs")
    code, document, err = run(capsys, "why", logs, "--json", "-n", "2")
    assert (code, err) == (0, "") and document.keys() <= fields_of("why") and len(document["why"]) == 2
    assert document["why"][0].keys() <= fields_of("why")
    code, document, err = run(capsys, "timeline", logs, "--json")
    assert (code, err) == (0, "") and document.keys() == fields_of("timeline")
    assert document["state"] == "FAILED" and document["restarts"] == 1 and "code 7" in document["cause"]
    assert Path(document["picture"]).exists() and Path(document["trace"]).exists()
    code, document, err = run(capsys, "spent", logs, "--json")
    assert (code, err) == (0, "") and document.keys() == fields_of("spent")
    code, document, err = run(capsys, "policy", "explain", logs, "--json")
    assert (code, err) == (0, "") and {"code", *document, *document["rounds"][0]} == fields_of("policy")


def test_doctor_and_version_print_the_fields_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, err = run(capsys, "doctor", "--json")
    levels = {each["level"] for each in document["findings"]}
    assert err == "" and (code, document["code"]) == ((1, "failed") if "error" in levels else (0, "ok"))
    assert {*document, *document["findings"][0]} == fields_of("doctor")
    code, document, err = run(capsys, "version", "--json")
    assert (code, err) == (0, "") and document.keys() == fields_of("version")


@pytest.mark.all
@pytest.mark.ci
def test_a_rehearsal_prints_the_fields_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time\nfor step in range(9):\n    print('step', step, flush=True)\n    time.sleep(0.05)\n"
    )
    options = ["--json", "--only", "frozen", "--progress", r"step (\d+)", "train.py"]
    done = ran(sys.executable, "-m", "aelastic", "rehearse", *options, cwd=tmp_path)
    document = json.loads(done.stdout)
    assert done.stderr == "" and (done.returncode, document["code"]) in {(0, "ok"), (1, "failed"), (3, "cannot")}
    old = {each.old for each in RENAMED if each.where == "rehearsals"}
    assert {*document, *document["rehearsals"][0], *Habit._fields, "breaks"} - old == fields_of("rehearse")
    assert all(each["holds"] == each["passed"] for each in document["rehearsals"])


@pytest.mark.parametrize(
    "argv",
    [
        ("timeline", "nowhere", "--json"),
        ("spent", "nowhere", "--json"),
        ("policy", "explain", "nowhere", "--json"),
        ("doctor", "--json", "--no-such-option"),
        ("rehearse", "--json", "no-such-script.py"),
        ("version", "--json", "more"),
        ("status", "--json", "--no-such-option"),
    ],
    ids=lambda argv: argv[0],
)
def test_wrong_usage_is_a_document_too(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, document, err = run(capsys, *argv)
    assert code == 2 and document["code"] == "usage" and document["text"] and document.keys() == {"code", "text"}
    assert err.startswith("aelastic: error: ") and err.count("\n") == 1
