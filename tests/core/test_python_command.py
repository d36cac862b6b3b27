"""Commands of interpreters, as a fork server reads them."""

from __future__ import annotations

import pytest

from aelastic.workers.forkserver.command import PythonCommand, parse

READ = {
    "train.py": PythonCommand("python", (), "script", "train.py", ("train.py",)),
    "-u train.py --lr 1 -m": PythonCommand("python", ("-u",), "script", "train.py", ("train.py", "--lr", "1", "-m")),
    "-uO -X dev -Wdefault train.py": PythonCommand(
        "python", ("-uO", "-Xdev", "-Wdefault"), "script", "train.py", ("train.py",)
    ),
    "-u -m pkg.train a": PythonCommand("python", ("-u",), "module", "pkg.train", ("-m", "a")),
    "-um pkg": PythonCommand("python", ("-u",), "module", "pkg", ("-m",)),
    "-mpkg": PythonCommand("python", (), "module", "pkg", ("-m",)),
    "-c code a": PythonCommand("python", (), "code", "code", ("-c", "a")),
    "-bX importtime x": PythonCommand("python", ("-b", "-Ximporttime"), "script", "x", ("x",)),
}
NOT_READ = [
    "",
    "-",
    "-V",
    "-i train.py",
    "-uV",
    "--version",
    "-m",
    "-c",
    "-X",
    "-u",
    "--check-hash-based-pycs always x",
]


@pytest.mark.parametrize("words, command", READ.items())
def test_a_command_is_read(words: str, command: PythonCommand) -> None:
    assert parse("python", words.split()) == command


@pytest.mark.parametrize("words", NOT_READ)
def test_a_command_that_runs_no_program_is_not_for_a_forked_interpreter(words: str) -> None:
    assert parse("python", words.split(" ") if words else []) is None


@pytest.mark.parametrize("name", ["python", "/opt/venv/bin/python3", "python3.13", "python3.13t", "./python3"])
def test_interpreters_are_known_by_their_names(name: str) -> None:
    assert parse(name, ["x"]) is not None


@pytest.mark.parametrize("name", ["train.py", "bash", "pythonw.sh", "ipython", "/usr/bin/env"])
def test_other_programs_are_not(name: str) -> None:
    assert parse(name, ["x"]) is None


@pytest.mark.parametrize("words", [words for words in READ if "X" not in words and "uO" not in words])
def test_the_command_is_what_an_exec_would_have_got(words: str) -> None:
    command = parse("python", words.split())
    assert command is not None
    again = parse(command.command[0], command.command[1:])
    assert again == command
