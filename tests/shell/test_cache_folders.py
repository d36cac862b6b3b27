"""Cache folders of workers: who owns them, and which are refused."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import closing, nullcontext
from pathlib import Path

import anyio
import pytest

from aelastic.errors import InputError
from aelastic.workers import caches


def test_workers_are_led_to_one_folder_of_this_machine_but_not_where_the_user_chose(tmp_path: Path) -> None:
    folder = tmp_path / "kept" / caches.key()
    expected = {name: str(folder / sub) for name, sub in caches.FOLDERS.items()}
    with closing(caches.CacheFolder(tmp_path / "kept")) as kept:
        assert expected.items() <= kept.env({"CUDA_CACHE_PATH": ""}).items()
        assert "TRITON_CACHE_DIR" not in kept.env({"TRITON_CACHE_DIR": "/elsewhere"})
    for path in (tmp_path / "kept", folder, folder / "inductor"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_folder_in_it_that_others_can_write_or_that_they_can_replace_is_refused(tmp_path: Path) -> None:
    with closing(caches.CacheFolder(tmp_path / "mine")) as mine:
        inner = Path(mine.env({})["TRITON_CACHE_DIR"])
    inner.chmod(0o777)
    with pytest.raises(InputError) as caught:
        caches.CacheFolder(tmp_path / "mine")
    why = "a cache is code that your workers run; name a folder that only you can write to"
    assert str(caught.value) == f"cache_dir {inner} can be written by others: {why}"
    inner.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match=f"mine lies in {tmp_path}, which others can write to"):
        caches.CacheFolder(tmp_path / "mine")


@pytest.mark.parametrize(
    "mode, is_refused", [(0o755, False), (0o775, True), (0o757, True), (0o1777, False), (0o1775, False)]
)
def test_a_folder_above_it_is_not_written_by_others_unless_it_is_sticky(
    tmp_path: Path, mode: int, is_refused: bool
) -> None:
    above = tmp_path / "above"
    (above / "between").mkdir(parents=True)
    above.chmod(mode)
    refused = pytest.raises(InputError, match=f"lies in {above}, which others can write to .fix: chmod go-w {above}")
    with refused if is_refused else nullcontext():
        caches.CacheFolder(above / "between" / "mine").close()


def test_folders_that_are_made_on_the_way_are_the_users_own_whatever_the_umask_is(tmp_path: Path) -> None:
    usual = os.umask(0)
    try:
        caches.CacheFolder(tmp_path / "a" / "b" / "mine").close()
    finally:
        os.umask(usual)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_folder_below_one_of_another_user_is_refused(tmp_path: Path, mode: int) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    os.chown(above, 65534, -1)
    with pytest.raises(
        InputError, match=f"mine lies in {above}, which belongs to user 65534, so others can replace it"
    ):
        caches.CacheFolder(above / "mine")


def test_the_lock_of_a_build_that_was_killed_goes_but_not_of_one_that_may_be_running(tmp_path: Path) -> None:
    lock = tmp_path / "kept" / caches.key() / "extensions" / "py311_cpu" / "mine" / "lock"
    lock.parent.mkdir(parents=True, mode=0o700)
    lock.touch()
    first = caches.CacheFolder(tmp_path / "kept")
    assert not lock.exists()
    lock.touch()
    caches.CacheFolder(tmp_path / "kept").close()
    assert lock.exists()
    first.close()
    caches.CacheFolder(tmp_path / "kept").close()
    assert not lock.exists()


async def test_a_lock_that_another_agent_holds_for_a_moment_blocks_no_loop(tmp_path: Path) -> None:
    is_open = anyio.Event()

    async def open_and_close() -> None:
        with closing(await caches.open_cache(tmp_path / "kept")):
            is_open.set()

    await open_and_close()
    is_open = anyio.Event()
    lock = os.open(tmp_path / "kept" / caches.key() / ".in-use", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_and_close)
            await anyio.wait_all_tasks_blocked()  # it waits in its thread
            assert not is_open.is_set()
            fcntl.flock(lock, fcntl.LOCK_UN)
        assert is_open.is_set()
    finally:
        os.close(lock)


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(InputError, match="cache_dir /proc/none"):
        caches.CacheFolder(Path("/proc/none"))


def test_a_link_to_a_folder_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder").mkdir(mode=0o700)
    with closing(caches.CacheFolder(tmp_path / "link")) as linked:
        assert {*Path(linked.env({})["TRITON_CACHE_DIR"]).parents} >= {tmp_path / "folder"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(InputError, match="belongs to user 12345"):
        caches.CacheFolder(tmp_path)
    os.chown(tmp_path, 0, -1)


def test_byte_code_is_kept_there_only_where_the_installation_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert caches.has_byte_code()
    with closing(caches.CacheFolder(tmp_path)) as usual:
        assert caches.BYTE_CODE not in usual.env({})
    monkeypatch.setattr(caches, "has_byte_code", lambda: False)
    with closing(caches.CacheFolder(tmp_path)) as bare:
        assert bare.env({})[caches.BYTE_CODE] == str(tmp_path / caches.key() / "pycache")


def test_the_key_is_of_torch_python_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = caches.key()
    assert usual == caches.key()
    monkeypatch.setattr(caches, "_driver", lambda: ["NVRM version: 999"])
    assert caches.key() != usual
