"""Where our error files differ from torch's, as documented in docs/how-to/from-torchrun.md, checked on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import aelastic.errors as ours

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def torchs() -> Any:
    return pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")


def test_a_malformed_error_file_is_an_error_of_torchs_agent_and_no_message_in_ours(torchs: Any, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text("{nonsense")
    with pytest.raises(json.JSONDecodeError):
        torchs.ProcessFailure(local_rank=0, pid=1, exitcode=3, error_file=str(path))
    failure = ours.ProcessFailure(local_rank=0, pid=1, exitcode=3, error_file=str(path))
    assert failure.exitcode == 3 and failure.error_file_data == {"message": "<NONE>"}


def test_record_around_a_launch_writes_the_agents_own_file_also_where_torchs_does_not(
    torchs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, Any] = {}
    for module in (torchs, ours):
        for has_recorded in (False, True):
            child, own = tmp_path / "child.json", tmp_path / f"{module.__name__} {has_recorded}"
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
            child.unlink(missing_ok=True)
            if has_recorded:
                child.write_text(json.dumps({"message": {"message": "boom", "extraInfo": {"timestamp": "7"}}}))
            failure = module.ProcessFailure(local_rank=0, pid=1, exitcode=3, error_file=str(child))

            def launch(failure: Any = failure, module: Any = module) -> None:
                raise module.ChildFailedError("train.py", {0: failure})

            with pytest.raises(module.ChildFailedError):
                module.record(launch)()
            written[own.name] = json.loads(own.read_text())["message"] if own.exists() else None
    names = torchs.__name__, ours.__name__
    assert written[f"{names[0]} True"] == written[f"{names[1]} True"]
    assert written[f"{names[0]} False"] is None
    assert written[f"{names[1]} False"]["errorCode"] == 3
