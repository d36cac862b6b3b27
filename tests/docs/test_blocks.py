"""Runs every code block of every page; a block that cannot run here has a reason and another check.

`BLOCKS` lists a page's blocks in order.  `test_pages.py` runs the tutorials as a whole.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
from kit.faults import netns
from kit.launching import PREAMBLE
from kit.pages import PAGES, TUTORIALS, Block, blocks, read_launch, run_in_shell
from kit.ports import quiet_port
from kit.servers.pods import manifest, pod_template, problems
from kit.servers.recipes import BIN, python_with
from sources import ROOT

from aelastic.cli.parser import VERBS, read_options
from aelastic.cli.rehearsal import ALL_GROUPS
from aelastic.cli.spent import as_text
from aelastic.cli.verbs.texts import why
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.observe.run_state import GenerationEnd
from aelastic.observe.status import describe_ends
from aelastic.observe.time_spent import TimeSpent
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.ledger import Blamed, Ledger
from aelastic.rdzv.restart_policy import End, RestartPolicy, cause_of
from aelastic.tools.spent.report import CostReport, advice_of, in_tenths, notes_of
from aelastic.training import Round

yaml = pytest.importorskip("yaml")  # PyYAML: in the group dev

LIMIT_S = 150.0
# Signatures, and examples that `tests/core/test_help.py` parses like the program.
GENERATED = {"docs/reference/api.md", "docs/reference/cli.md"}
# Replacements for a reader's machines, devices and packages, and for commands that wait for input.
HERE = {
    r"(--nproc-per-node |local_world_size=)8": r"\g<1>1",
    r"--nnodes 2:4": "--nnodes 2",
    r"\bmax_nodes=4": "max_nodes=2",
    r"\bnode0:29400": "127.0.0.1:{port}",
    r"\b(localhost|0\.0\.0\.0):8080|(?<=CHECK_PORT=)8080": "127.0.0.1:{port}",
    r"localhost:8000": "127.0.0.1:{port}",
    r"(?<=uvicorn )": "--port {port} ",
    r"--linger 60": "--linger 0.1",
    r",transformers\b": ",json",
    r"tail -f": "cat",
    r"(?m)^\$ (aelastic status night-run)": r"$ until \1; do sleep 0.1; done",  # a reader types later
    r"/var/tmp/": "tmp/",
    r"\bpip install .*": "true",
    r"collector:4318": "127.0.0.1:9",
}
SCRIPT = f'{PREAMBLE}\nfor step in range(3):\n    print(f"step {{step}}/2", flush=True)\n'


@dataclass(frozen=True)
class Run:
    """A block that is run, as a script or as a program.

    Args:
        before: what the reader already has.
        after: commands that follow; they may check something.
        code: the last exit code.
        agents: how many run it side by side.
        script: additions to `train.py`.
        needs: programs or packages; the block is skipped without them.
        is_on_terminal: whether its output is drawn on a terminal, and not checked.
    """

    before: str = ""
    after: str = ""
    code: int = 0
    agents: int = 1
    script: str = ""
    needs: tuple[str, ...] = ()
    is_on_terminal: bool = False


@dataclass(frozen=True)
class Checked:
    """A block that is not run: the reason, and a check that replaces the run."""

    reason: str
    check: Callable[[Block], None]


def options_exist(block: Block) -> None:
    found = list(block.launches)
    assert found
    for module, rest in found:
        read_launch(module, rest)


def named(*texts: str, within: str = "") -> Callable[[Block], None]:
    """The files that a block names exist, and `within` contains the block's options and words."""

    def check(block: Block) -> None:
        for path in re.findall(r"\b(?:deploy|examples|docs)/[\w./@-]*\w", block.text):
            assert (ROOT / path).exists(), path
        if not within:
            return
        words = [word for text in texts for word in re.findall(text, block.text)]
        assert words and [word for word in words if word not in (ROOT / within).read_text()] == []

    return check


def from_example(script: str) -> Callable[[Block], None]:
    """The lines appear in the example, in this order; `...` replaces others."""

    def check(block: Block) -> None:
        there = iter([line.strip() for line in (ROOT / "examples" / script).read_text().splitlines()])
        shown = [line.strip() for line in block.text.splitlines() if line.strip() not in {"", "..."}]
        assert shown and [line for line in shown if line not in there] == []

    return check


def calls_the_round(block: Block) -> None:
    """The added lines call the round's methods with parameters that exist."""
    calls = re.findall(r"\bround\.(\w+)\((.*)\)", block.text)
    assert calls
    for method, given in calls:
        words = set(re.findall(r"(\w+)=", given))
        assert words <= set(inspect.signature(getattr(Round, method)).parameters), (method, words)


def verbs(block: Block) -> None:
    made = re.findall(r"^make ?([\w-]*)", "\n".join(block.commands), re.MULTILINE)
    assert made and [verb for verb in made if f"\n{verb or 'help'}:" not in (ROOT / "Makefile").read_text()] == []


def asks(block: Block) -> None:
    found = re.findall(r"\$ aelastic (\w+)", block.text)
    assert found and {*found} <= {*VERBS}
    columns = re.findall(r"\b[A-Z]{3,}\b", block.text)
    source = (ROOT / "aelastic/cli/verbs/texts.py").read_text()
    assert columns and all(f'"{column}"' in source for column in columns)


def asks_where_it_hangs(block: Block) -> None:
    """The command exists, and its output is text from the code."""
    (command,) = block.commands
    assert command.removeprefix("aelastic ") in VERBS
    is_logged(block._replace(text="\n".join(block.shown)))


def shows_why(block: Block) -> None:
    """The output is what the code would print."""
    failure = ProcessFailure.from_elsewhere("n1", 5, 1, 4711, -11, "Signal 11 (SIGSEGV) received by PID 4711")
    ledger = Ledger(blamed=(Blamed("n1", 0.0),))
    decision = RestartPolicy(9).decide(End(cause_of(failure), failure, 1, ledger, now=1.0, nodes=8, hosts=8))
    end = GenerationEnd(7, 0.0, 1860.0, "failure", wording.text_of(decision), failure, 4120, decision=decision)
    now = datetime(2026, 1, 2, 9, 14, 2, tzinfo=UTC)
    assert block.text == f"$ aelastic why\n{why(describe_ends([end], 1860.0, now), earlier=6)}\n"


def shows_what_was_spent(block: Block) -> None:
    """The output is what the code would print for such a job."""
    spent = TimeSpent()
    hours = {"trained": 24.78, "twice": 1.06, "starting": 0.652, "hung": 0.4347, "drained": 0.1358, "waiting": 0.1086}
    spent.seconds |= {name: 3600 * each for name, each in hours.items()}
    spent.seconds |= {"stopping": 4.1, "rendezvous": 2.2, "imports": 738.2, "first step": 1602.7}
    spent.failures, spent.starts, spent.hangs, spent.again, spent.most, spent.rate = 6, 9, 1, 15702, 402118, 4.3
    seconds = spent.until(0.0)
    report = CostReport(
        "resnet", sum(seconds.values()), 8, seconds, in_tenths(seconds),
        {name: each / 3600 * 8 * 2.1 for name, each in seconds.items()}, notes_of(spent),
        tuple(advice_of(spent, 14.0, is_cold=True)), 0,
    )  # fmt: skip
    assert block.text.partition("--save 14\n")[2] == as_text(report) + "\n"


def asks_to_rehearse(block: Block) -> None:
    """Its options exist."""
    (words,) = re.findall(r"aelastic rehearse (.*)", block.text)
    chosen = read_options(shlex.split(words), {}, ALL_GROUPS)
    assert chosen["metric"] and chosen["checkpoints"]


def in_a_network_of_its_own(block: Block) -> None:
    """Runs its commands in a separate network namespace, out of reach of this machine."""
    if netns.why_not() or shutil.which("nft") is None:
        pytest.skip(netns.why_not() or "there is no nft (Debian: nftables)")
    command = ["unshare", "--net", "sh", "-ec", f"{block.text}\nnft list ruleset"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "10.0.0.0/28" in done.stdout and "drop" in done.stdout


@cache
def texts_in_the_code() -> set[str]:
    modules = (path.read_text() for path in ROOT.glob("aelastic/**/*.py"))
    return {text for module in modules for text in re.findall(r"\w[\w ,;:-]{10,}\w", module)}


def is_logged(block: Block) -> None:
    """Each line contains a text from the code; frames of a stack are the reader's."""
    known = texts_in_the_code()
    lines = [line for line in block.text.splitlines() if not re.match(r'\s*(.*File "|…)', line)]
    assert lines and [line for line in lines if not any(text in line for text in known)] == []


def fits_a_container(block: Block) -> None:
    (job,) = [each for each in manifest("indexed-job") if each["kind"] == "Job"]
    container = pod_template(job)["spec"]["containers"][0]  # type: ignore[index]
    container.update(yaml.safe_load(block.text))
    assert problems(job) == []
    container.update({"livenessProbes": {}})
    assert problems(job)


def is_a_scrape_config(block: Block) -> None:
    config = yaml.safe_load(block.text)
    assert all((ROOT / "docs" / file).exists() for file in config["rule_files"])
    assert config["scrape_configs"][0]["job_name"] == "aelastic"


def names_metrics(block: Block) -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    names = re.findall(r"\baelastic_\w+", block.text)
    assert names and [name for name in names if f"`{re.sub('_sum$', '', name)}`" not in page] == []


def runs_in_an_image(block: Block) -> None:
    named()(block)
    (words,) = re.findall(r"docker run.* training (.*)", block.text.replace("\\\n", " "))
    read_launch("", words.rpartition(" ")[0])
    assert (ROOT / "deploy/docker/Dockerfile").read_text().count("ENTRYPOINT") == 1


NODES = Run(agents=2)
CLUSTER = "needs a cluster; tests/nodes/test_kubernetes.py emulates the pods"
SPEC = 'import asyncio, sys\nfrom aelastic import WorkerSpec\nspec = WorkerSpec(entrypoint=sys.executable, args=("train.py",))'
FENCE = """import os
from types import SimpleNamespace
os.environ["AELASTIC_ROUND"] = "3"
class Storage:
    round = 0
    def put_if(self, state, condition, round):
        if is_met := condition(SimpleNamespace(round=self.round)):
            self.round = round
        return is_met
"""
OVERTAKEN = """
storage = Storage()
save(storage, "x")
storage.round = 4
try:
    save(storage, "y")
except SystemExit as error:
    assert "a newer one" in str(error)
else:
    sys.exit("an old round has written")
"""
FLAG = (
    "from aelastic.base.setting import SECONDS, own, setting\nfrom aelastic.base.texts import read_seconds",
    """option = exit_barrier_timeout_s.metadata["setting"].option
assert option.variables == ("AELASTIC_EXIT_BARRIER_TIMEOUT",) and option.default == "300\"""",
)
EVENT = (
    """from types import SimpleNamespace
from aelastic.workers.states import Phase
from aelastic.agent.group.worker_group import WorkerGroup
assert "assigned" in WorkerGroup.__match_args__ + tuple(WorkerGroup.__annotations__)
group = SimpleNamespace(phase=Phase.BARRIER, assigned=SimpleNamespace(round=3))
self, events, ev = SimpleNamespace(_phase=Phase.RUNNING), [], SimpleNamespace(NodeFinished=int)""",
    "assert events == [3]",
)
IN_PLACE = (
    """import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
STEPS, load = 3, lambda: None
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
def compute_loss(ddp, step):
    return ddp(torch.ones(2)).sum()""",
    "assert scheduler.last_epoch == 3",
)
SAMPLER = (
    """import os
from types import SimpleNamespace
from torch.utils.data import DataLoader
from aelastic.training import ResumableSampler
os.environ.update(RANK="0", WORLD_SIZE="2")
data, model, optimizer, round = range(256), None, None, SimpleNamespace(share=lambda *_: 7)""",
    "assert sampler.epoch == 1 and len(list(loader)) == 1 and len(list(loader)) == 4",
)
BLOCKS: dict[str, list[Run | Checked]] = {
    "README.md": [
        Run(),
        Run(),
        Checked("tests/docs/test_examples.py and test_demo_elastic.py run the demos", verbs),
        NODES,
        Run(),
    ],
    "CONTRIBUTING.md": [Checked("these are the tests", verbs), Run(*FLAG), Run(*EVENT)],
    "docs/development/release.md": [
        Checked("these are the tests", verbs),
        Checked("needs the network; tests/docs/test_release.py installs from a local index", verbs),
    ],
    "docs/index.md": [Run()],
    "docs/explanation/restarts.md": [Checked("lines of a log", is_logged)],
    "docs/how-to/caches.md": [Run()],
    "docs/how-to/cloud.md": [Checked("costs money; tests/recipes/test_cloud.py runs the script", named(r"training-\w+", within="deploy/cloud/start.sh"))],
    "docs/how-to/docker.md": [Checked("needs docker; tests/recipes/test_docker.py runs the build's steps", runs_in_an_image)],
    "docs/how-to/drain.md": [
        Run("start, steps, train, save = 0, 3, print, print"),
        Run(agents=2),
        Checked("lines of a log", is_logged),
    ],
    "docs/how-to/failed.md": [
        Run("aelastic --nproc-per-node 2 --log-dir logs train.py", script="sys.exit(3) if rank == 1 else rest()"),
    ],
    "docs/how-to/fastapi.md": [Run("ln -s $ROOT/examples", "kill %1; wait %1; true", needs=("fastapi", "uvicorn", "curl"))],
    "docs/how-to/hardening.md": [Checked("needs etcd with certificates; tests/nodes has one for each option", options_exist)],
    "docs/how-to/hangs.md": [
        Checked("asks a job that hangs; the tutorial has one", asks_where_it_hangs),
        Run(after="kill %1; wait %1", code=143, script="rest()", needs=("curl",)),
        Run(), Checked("lines of a log", is_logged), Checked("lines of a log", is_logged),
    ],
    "docs/how-to/in-place-frameworks.md": [
        *(
            Checked("tests/torch/test_in_place_frameworks.py runs it", from_example(f"in_place/{script}"))
            for script in ("accelerate_loop.py", "transformers_trainer.py", "lightning_trainer.py")
            for _ in ("command", "lines")
        ),
        Run(*SAMPLER),
        Checked("needs GPUs, and was not run", calls_the_round),
        Checked("needs GPUs, and was not run", calls_the_round),
    ],
    "docs/how-to/in-place.md": [
        Run(*IN_PLACE), Run(), Checked("lines of a log", is_logged),
        Checked("lines of a rehearsal", is_logged),
        Run("", "assert Late().state_dict() is Value().state_dict() is None and ResumableSampler"),
    ],
    "docs/how-to/install.md": [Run(), Run()],
    "docs/how-to/jupyter.md": [
        Checked("opens a browser; tests/recipes/test_programs.py runs the notebook", named()),
        Run("import asyncio\nasync def cell():\n", "    print(result.state)\nasyncio.run(cell())"),
    ],
    "docs/how-to/kubernetes.md": [Checked(CLUSTER, named(r"train(?=-2)", within="deploy/kubernetes/indexed-job.yaml"))],
    "docs/how-to/logs.md": [Run()],
    "docs/how-to/opentelemetry.md": [Run()],
    "docs/how-to/preload.md": [Run()],
    "docs/how-to/progress.md": [
        Run(is_on_terminal=True),
        Checked(CLUSTER, named(r'"(\w+[PR]\w+)":', within="aelastic/observe/export/trainer.py")),
    ],
    "docs/how-to/prometheus.md": [
        Run(),
        Checked("tests/nodes/test_prometheus.py has a Prometheus scrape a job", is_a_scrape_config),
        Checked("tests/nodes/test_prometheus.py asks a Prometheus", names_metrics),
    ],
    "docs/how-to/ray.md": [Checked("tests/recipes/test_programs.py runs it with a smaller script", named(r"(--[\w-]+) \d+ ", within="examples/ray_nodes.py"))],
    "docs/how-to/secret.md": [
        Checked("changes this machine's firewall; it is done in a network of its own", in_a_network_of_its_own),
        Run(after="test -s secret && test $(stat -c %a secret) = 600", needs=("openssl",)),
        Run("(umask 077 && openssl rand -hex 32 > secret)", agents=2, needs=("openssl",)),
        Checked("lines of a log", is_logged),
    ],
    "docs/how-to/slurm.md": [Checked("tests/recipes/test_slurm.py submits the script in a Slurm", named(r"train\.sbatch", within="deploy/slurm/train.sbatch"))],
    "docs/how-to/stop.md": [
        Run(after="wait %1", code=143, script="rest()"),
    ],
    "docs/how-to/rehearse.md": [
        Checked("the tutorial, which is run, has it with a script", asks_to_rehearse),
        Checked("lines of a rehearsal", is_logged),
        Checked("a workflow of another project", asks_to_rehearse),
    ],
    "docs/how-to/spent.md": [Checked("is of a job of a day", shows_what_was_spent)],
    "docs/how-to/speak.md": [Checked("asks a job of three nodes; tests/nodes/test_verbs_of_a_team.py does", asks)],
    "docs/how-to/verdicts.md": [
        Run(code=1, script="\n" * 32 + "{}['lr']", needs=()),
        Run(code=1, script="raise ValueError"),
        Run(
            "yes | head -39 | sed s/y// > train.py; echo \"{}['lr']\" >> train.py; "
            "python -m aelastic --max-restarts 3 --log-dir logs train.py || true"
        ),
        Run(),
        Checked("shows a job of several hosts; tests/nodes/test_blame.py has one", shows_why),
    ],
    "docs/how-to/systemd.md": [Checked("changes this machine; tests/recipes/test_systemd_units.py runs the unit", named())],
    "docs/how-to/timeline.md": [Run()],
    "docs/how-to/torchx.md": [Checked("tests/recipes/test_torchx.py runs it with a shorter script", named(r"--(max_restarts|script)", within="aelastic/under/torchx.py"))],
    "docs/reference/event-log.md": [
        Run(needs=("jq",)),
        Run("aelastic --log-dir logs train.py; cp logs/latest/events.jsonl .", needs=("jq",)),
    ],
    "docs/reference/http.md": [
        Run(after="kill %1; wait %1", code=143, script="rest()", needs=("curl",)),
        Checked("a part of a manifest", fits_a_container),
        Checked("a part of a manifest", fits_a_container),
        Run(SPEC, "asyncio.run(supervisor.run())"),
    ],
    "docs/reference/rendezvous.md": [
        NODES,
        Checked("options for each of three hosts, which tests/nodes/test_several_endpoints.py has", lambda block: read_launch("", block.text)),
        Run(code=1),
        Run(FENCE, "import sys\n" + OVERTAKEN),
        NODES,
    ],
    "docs/reference/stacks.md": [Checked("lines of a report", is_logged)],
}  # fmt: skip


def all_blocks() -> dict[str, list[Block]]:
    found = {page.relative_to(ROOT).as_posix(): blocks(page) for page in PAGES if page not in TUTORIALS}
    found = {page: [each for each in shown if each.language != "mermaid"] for page, shown in found.items()}
    return {page: shown for page, shown in found.items() if shown and page not in GENERATED}


def entries(kind: type[Run | Checked]) -> list[object]:
    return [
        pytest.param(block, entry, id=f"{page} {place + 1} {getattr(entry, 'reason', '')}")
        for page, shown in all_blocks().items()
        for place, (block, entry) in enumerate(zip(shown, BLOCKS.get(page, ()), strict=False))
        if isinstance(entry, kind)
    ]


def test_each_block_is_run_or_has_a_reason() -> None:
    there = {page: len(shown) for page, shown in all_blocks().items()}
    assert there == {page: len(listed) for page, listed in BLOCKS.items()}


@pytest.mark.parametrize("block, entry", entries(Checked))
def test_a_block_that_is_not_run_names_what_there_is(block: Block, entry: Checked) -> None:
    entry.check(block)


@pytest.mark.parametrize("block, entry", entries(Checked))
def test_a_block_that_names_what_is_not_there_is_found(block: Block, entry: Checked) -> None:
    wrong = re.sub(r"(--|\b(?:deploy|examples)/|make |aelastic_|[a-z]{3,})(?=\w)", r"\g<1>qq", block.text)
    with pytest.raises((AssertionError, ValueError, SystemExit, KeyError, StopIteration)):
        entry.check(block._replace(text=wrong))


@pytest.mark.all
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("block, entry", entries(Run))
def test_a_block_runs_and_shows_what_it_says(tmp_path: Path, block: Block, entry: Run) -> None:
    if missing := [each for each in entry.needs if not shutil.which(each) and not (BIN / each).exists()]:
        python_with(*missing)
    (tmp_path / "train.py").write_text(SCRIPT + entry.script)
    block = block._replace(text=with_what_is_here(block.text))
    if block.language == "python":
        text = re.sub("^", "    ", block.text, flags=re.MULTILINE) if "def cell" in entry.before else block.text
        (tmp_path / "block.py").write_text(f"{entry.before}\n{text}\n{entry.after}\n")
        lines = ["python block.py"]
    elif block.language == "diff":
        lines = [line[1:] for line in block.text.splitlines() if line.startswith("+")]
    else:
        lines = block.commands
    script = "\n".join(lines)
    if entry.agents > 1:
        agents = [f"({script}) & agent{each}=$!" for each in range(entry.agents)]
        script = "\n".join([*agents, " && ".join(f"wait $agent{each}" for each in range(entry.agents))])
    if block.language != "python":
        script = f"{entry.before}\n{script}\n{entry.after}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], str(BIN)])
    env = {"PATH": path, "ROOT": str(ROOT), "USER": "reader"}
    output = run_in_shell(tmp_path, f"{script.rstrip()}\ncode=$?; echo; echo exit code $code", env, LIMIT_S)
    assert output.endswith(f"\nexit code {entry.code}\n"), output
    for line in () if entry.is_on_terminal else block.shown:
        assert is_seen(line, output), f"{line!r} is not in\n{output}"


def with_what_is_here(text: str) -> str:
    port = str(quiet_port())
    for pattern, here in HERE.items():
        text = re.sub(pattern, here.replace("{port}", port), text)
    return text


def is_seen(line: str, output: str) -> bool:
    """Whether the line or its subject is in the output; numbers and names of machines are the reader's."""
    finding = re.match(r"(?:ok|warning|error) +([^:]+(?::\d+)?):", line)
    if finding:
        return bool(re.search(rf"^(ok|warning|error) +{re.escape(finding[1])}:", output, re.MULTILINE))
    words = re.escape(re.sub(r"[\d.]+.*", "…", line)).split("…")[0]
    return bool(re.search(f"^{words}", output, re.MULTILINE))
