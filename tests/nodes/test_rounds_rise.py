"""`AELASTIC_ROUND` rises throughout a job's life, however often all its agents end: both recipes, as on the page."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from kit.launching import Launcher
from kit.ports import quiet_port
from kit.servers.etcd_servers import EtcdServer, distro_etcd, etcd

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("warm_stores")]
PAGE = (Path(__file__).parents[2] / "docs/reference/rendezvous.md").read_text()
(SAVE,) = re.findall(r"```python\n(import os\n\nROUND = .*?)```", PAGE, re.DOTALL)
(NAME,) = re.findall(r"\(`(ckpt-\{ROUND[^`]*)`\)", PAGE)
STARTS, STEPS = 3, 2

# Trains some steps, fails in the first round of each start, and exits.  It resumes from what the recipes load.
WORKER = f"""
import json
from pathlib import Path
from types import SimpleNamespace
{SAVE}

class Storage:
    path = Path("stored")

    def stored(self):
        return json.loads(self.path.read_text()) if self.path.exists() else dict(round=0, step=0)

    def put_if(self, state, condition, round):
        if is_met := condition(SimpleNamespace(**self.stored())):
            self.path.write_text(json.dumps(dict(round=round, step=state)))
        return is_met

storage = Storage()
newest = max(Path(".").glob("ckpt-*"), default=None, key=lambda path: path.name)
resumed = dict(by_store=storage.stored()["step"], by_name=int(newest.read_text()) if newest else 0)
with open("rounds", "a") as file:
    file.write(json.dumps(dict(round=ROUND, **resumed)) + "\\n")
for step in range(resumed["by_store"] + 1, resumed["by_store"] + {STEPS} + 1):
    save(storage, step)
    Path(f"{NAME}").write_text(str(step))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(5)
"""


def options_of(backend: str, endpoint: str, run_id: str) -> list[str]:
    port = quiet_port()
    match backend:
        case "one node":
            return ["--standalone", "--rdzv-id", run_id]
        case "static":
            where = ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank", "0"]
            return ["--nnodes", "1", "--rdzv-backend", "static", "--rdzv-id", run_id, *where]
    lease = ["--rdzv-conf", "lease=120,last_call_timeout=0.1"]
    return [
        "--nnodes",
        "1:2",
        "--rdzv-backend",
        backend,
        "--rdzv-endpoint",
        endpoint or f"127.0.0.1:{port}",
        "--rdzv-id",
        run_id,
        *lease,
    ]


@pytest.mark.parametrize(
    "backend",
    ["c10d", *(pytest.param(backend, marks=pytest.mark.all) for backend in ("one node", "static", "etcd-v3"))],
)
def test_what_a_job_has_saved_is_resumed_from_over_three_starts(
    launch: Launcher, tmp_path: Path, run_id: str, backend: str
) -> None:
    """An etcd keeps its data for the second start, and is empty for the third."""
    with ExitStack() as stack:
        server = EtcdServer(distro_etcd(), tmp_path / "etcd", ["--enable-v2"]) if backend == "etcd-v3" else None
        options = options_of(backend, stack.enter_context(etcd(server)).endpoint if server else "", run_id)
        for number in range(STARTS):
            job = launch(WORKER, *options, "--max-restarts", "1")
            assert job.wait() == 0, job.story
            if server and number == 1:
                server.kill()
                server.forget()
                server.start()
    rounds = [json.loads(line) for line in (job.folder / "rounds").read_text().splitlines()]
    assert (
        [each["by_store"] for each in rounds]
        == [each["by_name"] for each in rounds]
        == [STEPS * before for before in range(2 * STARTS)]
    )
    assert all(one["round"] < other["round"] < 2**53 for one, other in pairwise(rounds))
