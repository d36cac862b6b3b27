"""The names of `torch.distributed.run`, as other tools use them, compared with torch's own."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.launching import ran
from kit.warm.interpreters import Warm
from kit.workers.torch_versions import SINCE, TORCH, options_of

from aelastic import ChildFailedError, InputError
from aelastic import launch as ours_of_launch
from aelastic import run as ours
from aelastic.logs_specs import DefaultLogsSpecs
from aelastic.settings import Std

pytestmark = pytest.mark.filterwarnings("ignore")

COMMAND_LINES = [
    "x.py",
    "--nnodes=1:4 --nproc_per_node 2 -m pkg.mod a --b",
    "--duplicate-stdout-filters a,,b,c --master-port 3 --standalone x.py",
    "--shutdown-timeout 4 --numa-binding node --monitor-interval 2 --logs-specs q -r3 -t 0:1 x",
    "--rdzv-backend=c10d --rdzv-endpoint=h:1 --nnodes=2:3 --rdzv-id q --rdzv-conf a=b,timeout=5 x.py 1",
    "--master-port=4 --node-rank=1 --nnodes=2 --max-restarts 3 --role r --start-method fork x.py --role q",
    "--run-path x.py z",
    "--log-line-prefix-template ${rank} x.py",
    "--virtual-local-rank --local-addr l --signals-to-handle SIGUSR1 --event-log-handler console x.py",
]
VARIABLES = {
    "PET_NNODES": "2", "PET_MAX_RESTARTS": "4", "PET_STANDALONE": "1", "PET_MODULE": "0", "PET_SHUTDOWN_TIMEOUT": "3",
    "PET_DUPLICATE_STDERR_FILTERS": "x,y", "PET_LOG_LINE_PREFIX_TEMPLATE": "p", "PET_MONITOR_INTERVAL": "2", "PET_TEE": "3", "PET_LOG_DIR": "d",
}  # fmt: skip


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch, torch_run: Any) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch sets it for the whole process
    return torch_run


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, sys\n"
        "open(os.environ['TOLD'] + os.environ['RANK'], 'w').write(\n"
        "    ' '.join([*sys.argv[1:], os.environ['WORLD_SIZE'], os.environ.get('OMP_NUM_THREADS', '-')]))\n"
    )
    return str(path)


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return lambda: [path.read_text() for path in sorted(tmp_path.glob("told?"))]


def typed(namespace: Any) -> dict[str, tuple[type, Any]]:
    return {name: (type(value), value) for name, value in vars(namespace).items()}


def typed_as(theirs: Any, namespace: Any) -> dict[str, tuple[type, Any]]:
    """The namespace without options newer than the installed torch, which must have their defaults."""
    later = typed(namespace).keys() - typed(theirs).keys()
    assert later <= SINCE.keys()
    if TORCH < (2, 13) and namespace.master_port is None:
        assert theirs.master_port == 29500
        later |= {"master_port"}
        del theirs.master_port
    return {name: each for name, each in typed(namespace).items() if name not in later}


def parsed(torchs: Any, argv: list[str]) -> Any:
    """torch's namespace; skips the test if this torch lacks an option."""
    if lacking := sorted(SINCE.keys() - options_of(torchs.get_args_parser())):
        names = {"--" + dest.replace("_", "-") for dest in lacking}
        if names & {word.partition("=")[0] for word in argv}:
            pytest.skip("an option that this torch lacks")
    return torchs.parse_args(argv)


# The namespace and the config.


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_namespace_is_torchs_attribute_by_attribute_and_so_is_its_endpoint(line: str, torchs: Any) -> None:
    theirs = parsed(torchs, line.split())
    assert ours.get_rdzv_endpoint(theirs) == torchs.get_rdzv_endpoint(theirs)
    assert typed_as(theirs, ours.parse_args(line.split())) == typed(theirs)


@pytest.mark.parametrize("variable", VARIABLES)
def test_variables_give_defaults_as_with_torch(variable: str, torchs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = vars(ours.parse_args(["x.py"]))
    monkeypatch.setenv(variable, VARIABLES[variable])
    found = ours.parse_args(["x.py"])
    theirs = torchs.parse_args(["x.py"])
    if variable.removeprefix("PET_").lower() not in vars(theirs):
        pytest.skip("an option that this torch lacks")
    assert typed_as(theirs, found) == typed(theirs)
    assert (vars(found) == plain) == (variable == "PET_MODULE"), "0 is the default there"


def test_an_empty_variable_is_unset(torchs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = vars(ours.parse_args(["x.py"]))
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
    assert vars(ours.parse_args(["x.py"])) == plain


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_config_is_torchs_but_for_where_output_goes(line: str, torchs: Any, tmp_path: Path) -> None:
    # No package registers a class under that line's name.
    argv = ["--log-dir", str(tmp_path), *line.replace("--logs-specs q", "").split()]
    parsed(torchs, argv)
    for parsed_by in (ours, torchs):
        config, entrypoint, args = ours.config_from_args(parsed_by.parse_args(argv))
        theirs, their_entrypoint, their_args = torchs.config_from_args(torchs.parse_args(argv))
        differing = {name for name, value in vars(theirs).items() if vars(config)[name] != value}
        # torch's `run` replaces `None` with 29500 shortly before.
        assert differing <= {"logs_specs", "numa_options", "rdzv_endpoint"}
        assert config.rdzv_endpoint == theirs.rdzv_endpoint.replace(":None", ":29500")
        assert config.logs_specs.root_log_dir == theirs.logs_specs.root_log_dir
        assert getattr(entrypoint, "__name__", entrypoint) == getattr(their_entrypoint, "__name__", their_entrypoint)
        assert args == their_args


def test_output_that_was_not_requested_makes_no_folder(
    torchs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    unasked = ours.config_from_args(ours.parse_args(["x.py"]))[0].logs_specs
    assert isinstance(unasked, DefaultLogsSpecs) and not list(tmp_path.iterdir())
    assert [unasked.root_log_dir] == [str(folder) for folder in tmp_path.iterdir()], "as with torch, once requested"
    asked = ours.config_from_args(ours.parse_args(["-t", "0:1", "--local-ranks-filter=0", "x.py"]))[0].logs_specs
    assert isinstance(asked, DefaultLogsSpecs)
    assert (asked._tee, asked._redirects, asked._local_ranks_filter) == ({0: Std.OUT}, Std.NONE, {0})


def test_a_parser_takes_what_a_tool_adds_and_forgives_what_it_does_not_know(torchs: Any) -> None:
    for module in (ours, torchs):
        parser = module.get_args_parser()
        parser.add_argument("--mine", type=int, default=1)
        found, unknown = parser.parse_known_args(["--training_script", "x.py", "--training_script_args", "a"])
        assert (found.mine, found.training_script, unknown) == (1, "x.py", ["--training_script"])
    assert "--nproc-per-node" in ours.get_args_parser().format_help()


def test_a_usage_error_leaves_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--nope", "x.py"], [], ["--start-method", "thread", "x.py"], ["--max-restarts", "many", "x.py"]):
        with pytest.raises(SystemExit) as caught:
            ours.main(argv)
        assert caught.value.code == 2
    assert "unrecognized arguments: --nope" in capsys.readouterr().err


# The small functions.


def test_numbers_of_nodes_and_workers_are_read_as_torch_reads_them(torchs: Any) -> None:
    for text in ("1", "2:3"):
        assert ours.parse_min_max_nnodes(text) == torchs.parse_min_max_nnodes(text)
    for text in ("1", "4", "cpu", "auto"):
        assert ours.determine_local_world_size(text) == torchs.determine_local_world_size(text)
    for text in ("3:1", "0", "-1:2"):
        assert ours.parse_min_max_nnodes(text) == torchs.parse_min_max_nnodes(text)
        with pytest.raises(InputError, match=f"--nnodes {text}"):
            ours.config_from_args(ours.parse_args([f"--nnodes={text}", "x.py"]))
    for text in ("1:2:3", "a:b:c", "x", "1:", ""):
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            torchs.parse_min_max_nnodes(text)
        with pytest.raises(type(theirs.value), match=f"nnodes is '{text}'") as caught:
            ours.parse_min_max_nnodes(text)
        assert isinstance(caught.value, InputError)
    for args in (SimpleNamespace(), SimpleNamespace(use_env=True), SimpleNamespace(use_env=False)):
        assert ours.get_use_env(args) == torchs.get_use_env(args)
    for text in ("", "x", "0", "xpu"):
        with pytest.raises(ValueError, match=f"nproc_per_node is '{text}'"):
            ours.determine_local_world_size(text)


@pytest.mark.parametrize(
    "module, counterpart",
    [
        ("aelastic.run", "torch.distributed.run"),
        ("aelastic.launch", "torch.distributed.launch"),
        ("aelastic.launch", "torch.distributed.launcher.api"),
    ],
)
def test_what_others_import_from_a_module_of_torch_is_in_ours(module: str, counterpart: str, torchs: Any) -> None:
    """Names that accelerate, dlrover, torchx, deepspeed and torch's own documentation import from there."""
    known = {
        "LaunchConfig", "elastic_launch", "launch_agent", "_get_entrypoint_name", "config_from_args",
        "determine_local_world_size", "get_args_parser", "get_rdzv_endpoint", "get_use_env", "main", "parse_args",
        "parse_min_max_nnodes", "run", "run_script_path", "Std", "LogsSpecs", "DefaultLogsSpecs", "record", "launch",
        "SignalException",
    }  # fmt: skip
    theirs = known & vars(importlib.import_module(counterpart)).keys()
    missing = theirs - vars(importlib.import_module(module)).keys() - {"record"}
    assert len(theirs) > 3 and not missing


# Runs.


def test_a_config_of_a_namespace_sets_the_number_of_threads_as_torchrun_does(
    torchs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nopen(os.environ['TOLD'], 'a').write(os.environ.get('OMP_NUM_THREADS', '-') + ' ')\n")
    for given, workers in ((None, 2), (None, 1), ("3", 2)):
        threads = []
        for module in (ours, torchs):
            monkeypatch.setenv("TOLD", str(tmp_path / f"told {module.__name__} {given} {workers}"))
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if given is not None:
                monkeypatch.setenv("OMP_NUM_THREADS", given)
            config, entrypoint, args = module.config_from_args(
                module.parse_args([f"--nproc-per-node={workers}", "--rdzv-backend=c10d", str(script)])
            )
            threads.append(os.environ.get("OMP_NUM_THREADS", "-"))
            if module is ours:
                ours.elastic_launch(config, entrypoint)(*args)
                assert Path(os.environ["TOLD"]).read_text().split() == threads * workers
        assert threads[0] == threads[1]


def test_main_runs_a_script(script: str, printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ours.main(["--nproc-per-node=2", script, "${local_rank}"])
    assert printed() == ["0 2 1", "1 2 1"]
    assert "OMP_NUM_THREADS" not in os.environ
    Path(script).write_text("raise LookupError('no batch left')\n")
    with pytest.raises(ChildFailedError, match="LookupError: no batch left") as caught:
        ours.main([script])
    assert caught.value.name == script


def test_a_namespace_of_torchs_parser_runs_as_its_caller_changed_it_or_made_it(
    torchs: Any, script: str, printed: Any
) -> None:
    args = torchs.parse_args(["--nproc_per_node=1", "nothing.py"])
    args.training_script, args.nproc_per_node, args.training_script_args = script, 2, ["changed"]
    args.tool_option = object()
    before = dict(vars(args))
    ours.run(args)
    assert vars(args) == before
    assert printed() == ["changed 2 1", "changed 2 1"]
    ours.run(SimpleNamespace(training_script=script, training_script_args=["old"], nproc_per_node="1"))
    assert printed()[0] == "old 1 1", "a namespace of an older torch gets defaults for missing options"


@pytest.mark.parametrize(
    "options",
    [
        ["--master-port=0", "--run-path"],
        pytest.param(["--standalone"], marks=pytest.mark.all),
        pytest.param(["--rdzv-backend=c10d"], marks=pytest.mark.all),
    ],
)
def test_a_node_on_its_own_runs_by_any_option_for_it(options: list[str], script: str, printed: Any) -> None:
    ours.main([*options, script, "alone"])
    assert printed() and printed()[0].startswith("alone 1")


@pytest.mark.parametrize(
    "argv, words",
    [
        (["no-such-script.py"], "script no-such-script.py not found"),
        (["--nnodes=2", "--rdzv-backend=c10d", "SCRIPT"], "--rdzv-endpoint"),
        (["--logs-specs", "nobodys", "SCRIPT"], "no installed package has it"),
    ],
)
def test_what_cannot_be_is_a_value_error_that_names_it(argv: list[str], words: str, script: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        ours.main([script if word == "SCRIPT" else word for word in argv])
    assert isinstance(caught.value, InputError)


# `torch.distributed.launch`.


def test_launch_hands_the_local_rank_to_the_script(script: str, printed: Any) -> None:
    ours_of_launch.launch(ours_of_launch.parse_args(["--nproc-per-node=2", script, "c"]))
    assert [line.split()[:2] for line in printed()] == [["--local-rank=0", "c"], ["--local-rank=1", "c"]]
    with pytest.warns(FutureWarning, match="read os.environ"):
        ours_of_launch.main(["--nproc-per-node=2", script, "a"])
    assert [line.split()[:2] for line in printed()] == [["--local-rank=0", "a"], ["--local-rank=1", "a"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours_of_launch.main(["--use_env", script, "b"])
        assert printed()[0].startswith("b 1")
        with pytest.raises(ValueError, match="--no-python without --use-env"):
            ours_of_launch.main(["--no-python", "true"])


@pytest.mark.parametrize(
    "line",
    [
        "--nproc-per-node=2 S a",
        *(
            pytest.param(line, marks=pytest.mark.all)
            for line in (
                "--nope S",
                "--use_env S a",
                "--no-python true",
                "--no-python --use-env true",
                "--run-path S q",
            )
        ),
    ],
)
def test_python_m_launch_does_what_torchs_does(
    line: str, script: str, printed: Any, tmp_path: Path, warm: Warm
) -> None:
    outcomes = []
    for module in ("aelastic.launch", "torch.distributed.launch"):
        for path in tmp_path.glob("told?"):
            path.unlink()
        argv = [script if word == "S" else word for word in line.split()]
        python = sys.executable if module == "aelastic.launch" else warm.python
        done = ran(python, "-m", module, *argv, env={**os.environ, "OMP_NUM_THREADS": "1", "PET_STANDALONE": "1"})
        outcomes.append((bool(done.returncode), printed(), "FutureWarning" in done.stderr))
    if line.startswith("--nope"):
        assert outcomes[0][:2] == outcomes[1][:2]  # torch has not reached its warning
    else:
        assert outcomes[0] == outcomes[1]


def test_python_m_run_is_the_command_line(script: str, printed: Any) -> None:
    argv = [sys.executable, "-m", "aelastic.run", "--loop=asyncio", script, "line"]
    done = ran(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert printed()[0].startswith("line 1")
