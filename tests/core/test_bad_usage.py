"""Bad input, as users see it: one line on stderr, exit code 2, nothing left behind.  `test_cli_usage` runs a few."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aelastic.cli.arguments import parse
from aelastic.cli.main import _explain, _stderr, main
from aelastic.errors import RendezvousConnectionError

C10D = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0"
ETCD = {"PET_RDZV_BACKEND": "etcd", "PET_RDZV_ENDPOINT": "n:2379"}
OPTIONS = [
    # What to run.
    ("", "no script given"),
    ("--nproc-per-node 2", "no script given"),
    ("missing.py", "script missing.py not found"),
    ("empty", "a folder without __main__.py"),
    ("--run-path missing.py", "script missing.py not found"),
    ("run.sh", "script run.sh is not a Python file (it begins with #!/bin/sh): run it with --no-python ./run.sh"),
    ("./program", "script ./program is not a Python file (it begins with ELF): run it with --no-python ./program"),
    ("statsu", "there is no script or command statsu: did you mean status?"),
    ("verison", "there is no script or command verison: did you mean version?"),
    ("train", "there is no script or command train: did you mean train.py?"),
    ("restart.py", "script restart.py not found"),
    ("--standalone statsu", "script statsu not found"),
    ("help statsu", "help: there is no command or topic statsu: did you mean status?"),
    ("timeline nowhere", "nowhere: no such file or folder"),
    (
        "timeline",
        "timeline: no LOGDIR given: name the --log-dir that the job ran with, as in aelastic timeline logs (see ",
    ),
    ("spent --save 3", "spent: no EVENTS given: name the --log-dir that the job ran with, as in aelastic spent logs"),
    ("-m no_such_module.part", "module no_such_module not found"),
    ("-m ./train.py", "not a module name"),
    ("--no-python no-such-program", "program no-such-program not found on PATH"),
    ("--no-python ./train.py", "not an executable file"),
    ("--no-python ./missing", "program ./missing not found"),
    ("--no-python -m json.tool", "exclude each other"),
    ("--start-method thread train.py", "use one of spawn, fork, forkserver"),
    # Unknown options.
    ("--bogus", "unknown option --bogus"),
    ("--max-restrats=3 train.py", "did you mean --max-restarts?"),
    ("--nproc=2 train.py", "ambiguous option"),
    ("--max-restarts", "expected one argument"),
    # How many.
    ("--nproc-per-node 0 train.py", "--nproc-per-node 0: at least 1 worker is needed"),
    ("--nproc-per-node -2 train.py", "at least 1 worker is needed"),
    ("--nproc-per-node 10000000 train.py", "--nproc-per-node 10000000: use at most 65536"),
    (f"--nproc-per-node {10**23} train.py", "use at most 65536"),
    ("--nproc-per-node many train.py", "use a number of workers, or auto, cpu, gpu or xpu"),
    ("--nnodes two train.py", "a range MIN:MAX"),
    ("--nnodes 3:2 train.py", "the minimum 3 is above the maximum 2"),
    ("--nnodes 0 train.py", "at least 1 node is needed"),
    ("--nnodes 1:1:1 train.py", "a range MIN:MAX"),
    ("--numa-binding near train.py", "--numa-binding near: use one of node, socket, exclusive, core-complex"),
    # Where they meet.
    ("--nnodes 1:2 train.py", "static takes a fixed number of nodes, not 1:2"),
    ("--nnodes 2:3 train.py", "static takes a fixed number of nodes, not 2:3: use c10d"),
    ("--standalone --nnodes 2 train.py", "--standalone is for a single node: leave out --standalone, or --nnodes 2"),
    ("--rdzv-backend= train.py", "use a name"),
    ("--rdzv-backend c10 train.py", "--rdzv-backend c10: no such back end: did you mean c10d?"),
    ("--rdzv-backend C10D train.py", "--rdzv-backend C10D: no such back end: did you mean c10d?"),
    ("--rdzv-backend etcdv3 train.py", "--rdzv-backend etcdv3: no such back end: did you mean etcd-v3?"),
    ("--rdzv-backend Static train.py", "--rdzv-backend Static: no such back end: did you mean static?"),
    ("--rdzv-backend torch:c10 train.py", "no such back end: did you mean torch:c10d?"),
    ("--rdzv-backend torch:etcdv3 train.py", "no such back end: did you mean torch:etcd-v3?"),
    (
        "--rdzv-backend zookeeper --rdzv-endpoint n:1 train.py",
        "zookeeper: no such back end: use static, c10d, etcd, etcd-v2, etcd-v3, torch:NAME, or install the package",
    ),
    ("--rdzv-backend torch: train.py", "--rdzv-backend torch:: no such back end: use static, c10d"),
    ("--rdzv-endpoint host train.py", "the port is missing: use host:PORT"),
    ("--nnodes 2 --rdzv-endpoint node7 train.py", "the port is missing: use node7:PORT"),
    ("--nnodes 2 --rdzv-backend c10d train.py", "c10d needs --rdzv-endpoint HOST:PORT: the same on every node"),
    (f"{C10D}:0 train.py", "port 0 picks a random port"),
    (f"{C10D}:70000 train.py", "the highest port is 65535"),
    (f"{C10D}:1,b:x train.py", "use HOST:PORT"),
    ("--nnodes 2 --rdzv-backend torch:c10d train.py", "torch:c10d needs --rdzv-endpoint"),
    ("--rdzv-backend etcd train.py", "etcd needs --rdzv-endpoint HOST:PORT"),
    ("--rdzv-backend etcd-v3 --rdzv-endpoint a:2379,b:c train.py", "etcd endpoint b:c: use host:port"),
    ("--rdzv-backend etcd-v2 --rdzv-endpoint a:0 train.py", "etcd endpoint a:0: use host:port"),
    ("--rdzv-backend etcd --rdzv-endpoint a --rdzv-conf protocol=ftp train.py", "protocol=ftp: use http or https"),
    ("--rdzv-backend torch:etcd --rdzv-endpoint http://a:1 train.py", "an IPv6 address in brackets, no protocol"),
    (f"{C10D} --rdzv-id= train.py", "use a run id that is not empty, the same on every node"),
    ("--rdzv-conf a train.py", "--rdzv-conf a: a has no value: use a=value"),
    ("--rdzv-conf =a train.py", "use key=value pairs, separated by commas"),
    (f"{C10D} --rdzv-conf join_timeout=soon train.py", "join_timeout=soon: use a number above 0"),
    (f"{C10D} --rdzv-conf keep_alive_max_attempt=0 train.py", "keep_alive_max_attempt=0: use a number above 0"),
    (f"{C10D} --rdzv-conf lease=inf train.py", "lease=inf: use a number above 0"),
    (f"{C10D} --rdzv-conf max_nodes=3 train.py", "max_nodes has an option of its own: use --nnodes"),
    ("--nnodes 2 --rdzv-conf timeout=-1 train.py", "timeout=-1: use a number above 0"),
    (f"{C10D} --rdzv-conf read_timeout=abc train.py", "read_timeout=abc: use a number above 0"),
    ("--node-rank 1 --master-port 29511 train.py", "--node-rank 1: a single node has rank 0"),
    ("--node-rank x train.py", "--node-rank x: use a whole number"),
    ("--nnodes 2 --node-rank 2 train.py", "--node-rank 2: the node ranks of 2 nodes are 0 to 1 "),
    ("--nnodes 2 --node-rank -1 train.py", "--node-rank -1: use 0 or more"),
    ("--local-addr= train.py", "use a host name or an address"),
    ("--master-port 65536 train.py", "use a port from 0"),
    ("--master-port http train.py", "use a whole number"),
    ("--nnodes 2 --master-port 0 train.py", "port 0 picks a random port, which other nodes cannot know"),
    ("--master-port 1 --master-addr= train.py", "use a host name or an address"),
    # When they fail, or must stop.
    ("--max-restarts x train.py", "--max-restarts x: use a whole number"),
    ("--max-restarts -1 train.py", "--max-restarts -1: use 0 or more"),
    ("--monitor-interval 0 train.py", "use seconds above 0"),
    ("--shutdown-timeout nan train.py", "use seconds, 0 or more"),
    ("--shutdown-timeout -1 train.py", "use seconds, 0 or more"),
    ("--shutdown-timeout soon train.py", "use a number of seconds"),
    ("--hang-timeout 0.5 train.py", "--hang-timeout 0.5: use 1 second or more"),
    ("--hang-timeout 1x train.py", "--hang-timeout 1x: use more than 1, times the median step, as in 5x"),
    ("--hang-timeout 5xy train.py", "--hang-timeout 5xy: use more than 1, times the median step, as in 5x"),
    ("--hang-timeout x5 train.py", "--hang-timeout x5: use a number"),
    ("--hang-timeout 5x --recovery restart train.py", "--hang-timeout 5x: no step is known without --progress: add it"),
    ("--restart-grace -1 train.py", "--restart-grace -1: use seconds, 0 or more, or shutdown-timeout"),
    ("--restart-grace soon train.py", "--restart-grace soon: use seconds, 0 or more, or shutdown-timeout"),
    ("--restart-grace 31 train.py", "--restart-grace 31: use at most --shutdown-timeout, which is 30"),
    ("--signals-to-handle SIGTERM,SIGNAL train.py", "SIGNAL is not a signal"),
    ("--signals-to-handle SIGKILL train.py", "SIGKILL cannot be handled"),
    ("--restart-policy @nowhere train.py", "the file cannot be read (No such"),
    ("--wrap no-such-program train.py", "no-such-program is not found"),
    ("--wrap env' train.py", "No closing quotation"),
    ("--wrap-ranks 1 train.py", "wrap_ranks has no effect without wrap"),
    # Their output.
    ("--redirects 4 train.py", "--redirects 4: "),
    ("--redirects=-1:3 train.py", "--redirects -1:3: "),
    ("--local-ranks-filter 0,x train.py", "--local-ranks-filter 0,x: use ranks separated by commas"),
    ("--local-ranks-filter x train.py", "--local-ranks-filter x: "),
    ("--local-ranks-filter 0, train.py", "--local-ranks-filter 0,: "),
    ("--local-ranks-filter=-1 train.py", "--local-ranks-filter -1: "),
    ("--local-ranks-filter 0-3 train.py", "--local-ranks-filter 0-3: "),
    ("--logs-specs loud train.py", "--logs-specs loud: no installed package has it"),
    ("--log-dir a-file train.py", "--log-dir a-file: cannot write there (Not a directory)"),
    ("--log-dir a-file/logs train.py", "cannot write there (Not a directory)"),
    ("--log-dir /proc/logs train.py", "--log-dir /proc/logs: cannot write there"),
    # Ours.
    ("--ui big train.py", "--ui big: use one of auto, line, view, off"),
    ("--loop trio train.py", "use one of uvloop, asyncio"),
    ("--exit-codes 1 train.py", "use one of cause, torchrun"),
]
VARIABLES = [
    ("PET_STANDALONE=yes", "use 1 for yes"),
    ("PET_STANDALONE=true", "use 1 for yes"),
    ("PET_NPROC_PER_NODE=0", "at least 1 worker"),
    ("PET_NPROC_PER_NODE=many", ""),
    ("PET_NNODES=2:1", "the minimum 2 is above the maximum 1"),
    ("PET_MAX_RESTARTS=-1", ""),
    ("PET_MASTER_PORT=70000", ""),
    ("PET_START_METHOD=thread", ""),
    ("PET_NODE_RANK=-1", ""),
    ("PET_RDZV_BACKEND=c10", "no such back end: did you mean c10d?"),
    ("PET_RDZV_BACKEND=zookeeper", ""),
    ("PET_RDZV_CONF=lease", "lease has no value"),
    ("PET_RDZV_CONF=join_timeout", ""),
    ("PET_RDZV_ID=a\nb", "use a run id without line breaks"),
    ("PET_REDIRECTS=7", ""),
    ("PET_LOG_DIR=/proc/logs", "cannot write there"),
    ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=inf", "use seconds"),
    ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=nan", ""),
    ("AELASTIC_LOOP=trio", "use one of"),
    ("AELASTIC_EXIT_CODES=all", ""),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the files that the command lines name, and the environment and logger of a new process."""
    (tmp_path / "train.py").touch()
    (tmp_path / "run.sh").write_text('#!/bin/sh\nexec echo "$RANK"\n')
    (tmp_path / "program").write_bytes(b"\x7fELF\x02\0")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").touch()
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("PET_", "AELASTIC_", "TORCH_ELASTIC_", "PYTHON_EXEC")):
            monkeypatch.delenv(name)
    ours = logging.getLogger("aelastic")
    before = ours.handlers[:], ours.propagate, ours.level
    yield tmp_path
    ours.handlers[:], ours.propagate, ours.level = before


@pytest.fixture
def assert_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str, str], None]:
    def refuse(command: str, expected: str) -> None:
        before = set(folder.rglob("*"))
        code = main(command.split())
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), err
        assert err.startswith("aelastic: error: ") and re.search(
            r" \((help: [a-z0-9-]+|see aelastic \w+ --help|see aelastic --help-all)\)\n$", err
        )
        assert err.count("\n") == 1 and expected in err
        assert set(folder.rglob("*")) == before

    return refuse


@pytest.mark.parametrize("command, expected", OPTIONS)
def test_a_bad_option_is_refused_in_one_line(
    assert_refused: Callable[[str, str], None], command: str, expected: str
) -> None:
    assert_refused(command, expected)


@pytest.mark.parametrize("setting, expected", VARIABLES)
def test_a_bad_variable_is_named(
    assert_refused: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, setting: str, expected: str
) -> None:
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    assert_refused("train.py", f"{' '.join(setting.split())}: {expected}")


@pytest.mark.parametrize(
    "environ, expected, variables",
    [
        (
            {"PET_NODE_RANK": "2"},
            "PET_NODE_RANK=2: the node ranks of 2 nodes are 0 to 1 (see aelastic --help-all)",
            "",
        ),
        (
            {"PET_NNODES": "2:4"},
            "rendezvous static takes a fixed number of nodes",
            "PET_NNODES",
        ),
        (
            {"PET_MASTER_ADDR": "http://n"},
            "rendezvous endpoint '[http://n]:29500': use HOST:PORT",
            "PET_MASTER_ADDR, PET_NNODES",
        ),
        (
            {"PET_MASTER_ADDR": "n", "PET_MASTER_PORT": "0"},
            "rendezvous endpoint n:0",
            "PET_MASTER_ADDR, PET_MASTER_PORT, PET_NNODES",
        ),
        (
            {"PET_RDZV_CONF": "timeout=abc"},
            "rendezvous setting timeout=abc: use a number above 0",
            "PET_RDZV_CONF, PET_NNODES",
        ),
        (
            {**ETCD, "PET_RDZV_CONF": "user=u,password_file=/none"},
            "rendezvous setting password_file=/none: No such file or directory",
            "PET_RDZV_BACKEND, PET_RDZV_ENDPOINT, PET_RDZV_CONF, PET_NNODES",
        ),
    ],
)
def test_what_variables_say_together_is_refused_by_their_names(
    assert_refused: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    expected: str,
    variables: str,
) -> None:
    for name, value in {"PET_NNODES": "2", **environ}.items():
        monkeypatch.setenv(name, value)
    assert_refused("train.py", f"aelastic: error: {expected}")
    if variables:
        assert_refused("train.py", f" (set by variables: {variables}) ")


@pytest.mark.parametrize(
    "options, environ, expected",
    [
        ("", {"PET_MASTER_ADDR": "n"}, "; the endpoint is from PET_MASTER_ADDR"),
        ("", {"PET_MASTER_ADDR": "n", "PET_RDZV_ENDPOINT": "m:1"}, "; the endpoint is from PET_RDZV_ENDPOINT"),
        ("--rdzv-endpoint m:1", {"PET_MASTER_ADDR": "n"}, ""),
        ("", {}, ""),
    ],
)
def test_an_endpoint_that_does_not_answer_is_reported_with_its_variable(
    folder: Path, capsys: pytest.CaptureFixture[str], options: str, environ: dict[str, str], expected: str
) -> None:
    invocation = parse([*options.split(), "--nnodes=2", "train.py"], environ)
    assert _explain(RendezvousConnectionError("cannot resolve n:1"), invocation.endpoint_note).code == 1
    assert _stderr.finish()
    line = f"aelastic: error: cannot resolve n:1{expected} (help: no-answer-from-the-endpoint)\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("second", ["'''exec' python \"$0\" \"$@\"\n' '''", "print()"])
def test_python_is_taken_whatever_program_its_first_line_names(tmp_path: Path, second: str) -> None:
    script = tmp_path / "train"
    script.write_text(f"#!/bin/sh\n{second}\n")
    assert parse([str(script)], {}).spec.args[-1] == str(script)


def test_a_python_that_is_not_there_is_named(
    assert_refused: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "no-such-python")
    assert_refused("train.py", "PYTHON_EXEC=no-such-python not found on PATH")


def test_a_log_folder_is_tried_with_a_name_that_nothing_can_take_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(Path, "rmdir", lambda path: made.append(path.name))
    for _ in range(2):
        parse(["--log-dir", str(tmp_path), __file__], {})
    assert len(set(made)) == 2 and all(not name.endswith(f"-{os.getpid()}") for name in made)
