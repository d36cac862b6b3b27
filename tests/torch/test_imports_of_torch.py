"""When an agent imports torch: once a listener or a torch handler needs it, and not before."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, ran

LIMIT_S = 2 * LAUNCH_TIMEOUT_S  # torch is imported while the agent does other work
pytestmark = pytest.mark.timeout(LIMIT_S + 20)
PROGRAM = """
import asyncio, sys
from aelastic import Supervisor, WorkerSpec
from aelastic.observe.torch_events import check_event_log_handler
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.torch_handler_link import handler_opener

for name in ("console", "dynamic_rendezvous", "null"):
    check_event_log_handler(name)
for name in ("torch:c10d", "static", "torch:pigeon"):
    handler_opener(name, RendezvousSettings(backend=name, endpoint="here:1", node_rank=0), "job")
opener = handler_opener("pigeon", RendezvousSettings(backend="pigeon"), "job")
asyncio.run(Supervisor(WorkerSpec(entrypoint="true")).run())
print("torch" in sys.modules)


def work():
    was_there = "torch.distributed.elastic.events" in sys.modules
    import torch.distributed.elastic.events  # it would wait for ever for what another thread was importing in the agent
    return was_there


spec = WorkerSpec(entrypoint=work, start_method="fork", event_log_handler="console")
print(asyncio.run(Supervisor(spec).run()).return_values)
print("torch" in sys.modules)
print(type(opener()).__name__)
"""


@pytest.mark.ci
@pytest.mark.all
def test_names_are_found_and_jobs_run_without_torch_and_a_forked_function_has_what_its_agent_imported(
    tmp_path: Path,
) -> None:
    package = tmp_path / "carrier-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torchrun.handlers]\npigeon = carrier:creator\n")
    (tmp_path / "carrier.py").write_text(
        "class Pigeon:\n    get_backend = lambda self: 'pigeon'\ndef creator():\n    return lambda parameters: Pigeon()\n"
    )
    done = ran(sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}", timeout=LIMIT_S)
    assert done.stdout == "False\n{0: True}\nTrue\nPigeon\n", done.stderr


@pytest.mark.all
def test_a_program_that_only_configures_metrics_receives_them() -> None:
    code = """
        import asyncio, sys
        from torch.distributed.elastic import metrics
        from aelastic import Supervisor, WorkerSpec
        class Handler(metrics.MetricHandler):
            def emit(self, data):
                print(data.group_name, data.name, data.value)
        metrics.configure(Handler(), "torchelastic")
        asyncio.run(Supervisor(WorkerSpec(entrypoint="true")).run())
        print("torch.distributed.elastic.events" in sys.modules)
    """
    done = ran(sys.executable, "-c", textwrap.dedent(code), timeout=LIMIT_S)
    assert "torchelastic workers.default.run_success_no_retries 1\n" in done.stdout, done.stderr
    assert done.stdout.endswith("\nFalse\n")
