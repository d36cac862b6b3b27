"""Any environment of an agent: it reports in one line what is invalid, or runs the job."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.agents import NEVER_LOGGED
from kit.effort import HOSTILE_LAUNCHES
from kit.hostile_input import LONG_EXAMPLES, TEXTS, hostile
from kit.launching import Launcher

from aelastic.agent.group.worker_env import STUCK_VARIABLE
from aelastic.agent.watches.activity import stuck_timeout_of
from aelastic.agent.watches.file_timer import TIMER_FILE_VARIABLE
from aelastic.agent.watches.hang_watches import FILE_TIMER_VARIABLE
from aelastic.base.host import control_sockets
from aelastic.cli.arguments import parse
from aelastic.cli.options import OPTIONS
from aelastic.compat.launcher.elastic_launch import loop_of
from aelastic.diagnose.stacks.collectives import RAS_VARIABLE, ras_line
from aelastic.errors import InputError
from aelastic.observe.export.systemd import SdNotify
from aelastic.observe.export.trainer import CA_CERT, TOKEN, URL, status_server
from aelastic.observe.health.address import HEALTH_PORT_VARIABLE
from aelastic.rdzv.protocol.secret_file import default_path

pytestmark = [pytest.mark.timeout(7200), pytest.mark.filterwarnings(LONG_EXAMPLES)]

OF_OPTIONS = sorted({variable for option in OPTIONS for variable in option.variables} - {"AELASTIC_SECRET_FILE"})
OTHERS = (
    HEALTH_PORT_VARIABLE, FILE_TIMER_VARIABLE, TIMER_FILE_VARIABLE, STUCK_VARIABLE, URL, CA_CERT, TOKEN, RAS_VARIABLE,
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "NCCL_RAS_ENABLE",
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "JOB_COMPLETION_INDEX",
    "SLURM_NODEID", "SLURM_NNODES", "SLURM_STEP_NUM_NODES", "CREDENTIALS_DIRECTORY", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "AELASTIC_LOOP", "LOGLEVEL", "NO_COLOR", "CI", "TERM", "JPY_PARENT_PID", "NOTIFY_SOCKET",
    "WATCHDOG_USEC", "WATCHDOG_PID", "XDG_RUNTIME_DIR", "TORCH_ELASTIC_WORKER_IDENTICAL",
)  # fmt: skip


def fits(text: str) -> bool:
    """Whether an environment can hold the text."""
    with suppress(UnicodeEncodeError):
        return "\0" not in text and len(os.fsencode(text)) < 100_000
    return False


WORDS = st.sampled_from(
    ["0", "1", "2", "3", "1:2", "2:1", "auto", "gpu", "c10d", "static", "etcd-v2", "a=b", "lease=1e999", "localhost:99999",
     "127.0.0.1:0", "[::1]:", "node..x:1", "spawn", "true", "1e400", "9" * 5000, "stop", "error (: stop", "exit 300: restart",
     "*: restart 1/0s", "@/nowhere", "step (\\d+", "(a+)+b", "30s", "-0", "\udcff", "USR1=drain:x", "/dev/full", "/proc/1/mem",
     "3:1,2:3", "0:x", "drain:1e9", "out:[", "http://[", "https://a:b:c", "@", "@" + "n" * 200, "/" + "p" * 5000]
)  # fmt: skip
ENVIRONMENTS = st.dictionaries(
    st.sampled_from(OF_OPTIONS) | st.sampled_from(OTHERS), (WORDS | TEXTS).filter(fits), min_size=1, max_size=3
)


@hostile
@given(ENVIRONMENTS)
@example({"WATCHDOG_USEC": "9" * 5000})
@example({RAS_VARIABLE: "localhost:99999"})
@example({RAS_VARIABLE: "a..b:1"})
def test_what_reads_the_environment_bears_it(environ: dict[str, str]) -> None:
    script = __file__
    full = {"PATH": os.defpath, **environ}
    try:
        parse([script], full)
        loop_of(full)
        stuck_timeout_of(full)
    except InputError:
        parse([script], {"PATH": os.defpath})
    SdNotify(full, 30.0)
    with suppress(InputError):
        status_server(full)
    default_path(full)
    control_sockets.folder_of(full)


@pytest.mark.parametrize(
    "address", ["localhost:99999", "a..b:1", "localhost:" + "9" * 5000, "\udcff:1", ":0", "[::1]:1"]
)
async def test_an_address_of_nccl_that_none_can_be_does_not_answer(address: str) -> None:
    assert await ras_line({RAS_VARIABLE: address}) == ""


ENDLESS = {
    "PET_STANDALONE",
    "PET_NNODES",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_CONF",
    "SLURM_NNODES",
    "SLURM_STEP_NUM_NODES",
    "AELASTIC_NOTICE_COMMAND",
    "AELASTIC_NOTICE_FILE",
    "PET_NPROC_PER_NODE",
    "AELASTIC_ON_FAILURE",
    "AELASTIC_HEALTH_CHECK",
}  # fmt: skip  of what waits for others, leaves, or starts a thousand


def test_an_agent_runs_its_job_or_says_in_one_line_why_not(launch: Launcher, tmp_path: Path) -> None:
    draws = list[dict[str, str]]()

    @hostile
    @given(ENVIRONMENTS.filter(lambda environ: not environ.keys() & ENDLESS))
    def draw(environ: dict[str, str]) -> None:
        draws.append(environ)

    draw()
    for number, environ in enumerate(draws[-HOSTILE_LAUNCHES:]):
        job = launch("say('start')", name=f"job-{number}", env=environ)
        code = job.wait()
        details = f"{environ}\n{job.story}"
        assert not NEVER_LOGGED.search(job.stderr) and "Traceback" not in job.stderr, details
        if code == 0:
            assert "start" in job.stdout or environ.keys() & {"PET_REDIRECTS"}, details
        else:
            assert code in {1, 2} and job.stderr.startswith("aelastic: "), details
