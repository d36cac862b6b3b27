"""A folder for what workers compile: where it is, whose it is, and what a killed build leaves in it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from kit.launching import Launcher

from aelastic.workers import caches

TELL = f"say(*[os.environ.get(name) for name in {list(caches.FOLDERS)!r}])"


@pytest.fixture(autouse=True)
def _no_folder_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler, which another test may have imported here, writes its folder into this process's environment."""
    for name in caches.FOLDERS:
        monkeypatch.delenv(name, raising=False)


def test_workers_are_led_to_one_folder_of_this_machine_but_not_where_the_user_chose(launch: Launcher) -> None:
    job = launch(TELL, "--cache-dir", "kept", env={"TRITON_CACHE_DIR": "/elsewhere", "CUDA_CACHE_PATH": ""})
    assert job.wait() == 0, job.story
    folder = job.folder / "kept" / caches.key()
    expected = {name: str(folder / sub) for name, sub in caches.FOLDERS.items()}
    assert job.lines == [" ".join({**expected, "TRITON_CACHE_DIR": "/elsewhere"}.values())]
    assert all(
        stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (job.folder / "kept", folder, folder / "inductor")
    )


def test_a_folder_that_others_can_write_is_refused_in_one_line(launch: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    job = launch("say('started')", "--cache-dir", str(folder))
    assert job.wait() == 2
    said = f"cache_dir {folder} can be written by others: a cache is code that your workers run; name a folder that only you can write to"
    assert said in job.stderr and job.stderr.count("\n") == 1
    assert job.stdout == "" and not list(folder.iterdir())
