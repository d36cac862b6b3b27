"""The file with a job's secret: who may read it, what it contains, and what remains of it in memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from kit.waiting import DEADLINE_S

from aelastic.errors import InputError
from aelastic.rdzv.protocol import secret_file
from aelastic.rdzv.protocol.keys import Key
from aelastic.rdzv.protocol.secret_file import FILE_BYTES_MAX, SecretFile, default_path
from aelastic.rdzv.settings import RendezvousSettings

NOBODY = 0xFFFFFFFF  # an entry of an access list that names nobody
ONE, TWO = b"1" * 64, b"2" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "secret"
    write(found, ONE + b"\n")
    return found


def write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replaces the file, as a person does."""
    new = path.with_name("new")
    new.write_bytes(data)
    new.chmod(mode)
    new.rename(path)


def ids(path: Path) -> list[str]:
    return [key.id for key in SecretFile(str(path), "run").keys]


def id_of(secret: bytes) -> str:
    return Key(secret, "run").id


@pytest.mark.parametrize("data", [ONE, ONE + b"\n", b"\n \t" + ONE + b"\r\n\n"])
def test_a_line_is_the_secret_whatever_stands_around_it(path: Path, data: bytes) -> None:
    write(path, data)
    assert ids(path) == [id_of(ONE)]


def test_of_two_lines_the_first_is_used_and_each_accepted(path: Path) -> None:
    write(path, TWO + b"\n" + ONE + b"\n")
    assert ids(path) == [id_of(TWO), id_of(ONE)]


@pytest.mark.parametrize(
    "data, found",
    [(b"", "none"), (b"x" * 31, "31"), (ONE + b"\nshort", "64, 5"), (b"\n".join([ONE] * 3), "64, 64, 64")],
)
def test_too_little_or_too_much_is_refused_with_what_makes_a_secret(path: Path, data: bytes, found: str) -> None:
    write(path, data)
    with pytest.raises(InputError) as caught:
        ids(path)
    use = "use one or two lines of at least 32 bytes each (openssl rand -hex 32)"
    assert str(caught.value) == f"secret file {path}: its lines have {found} bytes: {use}"


def test_a_large_file_is_none(path: Path) -> None:
    write(path, ONE * (FILE_BYTES_MAX // len(ONE)))
    assert ids(path)
    write(path, b"x" * (FILE_BYTES_MAX + 1))
    with pytest.raises(InputError, match="it has more than 4096 bytes"):
        ids(path)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601, 0o666])
def test_what_others_can_read_is_refused_with_the_command_that_fixes_it(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(InputError) as caught:
        ids(path)
    assert str(caught.value) == f"secret file {path}: others can read it (mode {mode:04o}): chmod 600 {path}"


def test_a_group_may_read_it_if_it_is_this_process_s_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o440)
    assert ids(path), "as Kubernetes mounts it with fsGroup"
    monkeypatch.setattr(os, "getegid", lambda: 4711)
    monkeypatch.setattr(os, "getgroups", lambda: [4712, path.stat().st_gid])
    assert ids(path)
    monkeypatch.setattr(os, "getgroups", lambda: [4712])
    with pytest.raises(InputError, match=rf"group {path.stat().st_gid} can read or write it \(mode 0440\): chmod 600 "):
        ids(path)


def test_an_access_list_may_name_this_user_and_no_other(path: Path) -> None:
    """As systemd passes a credential to a service: the mode shows the access list's mask as the group's rights."""

    def give(*entries: tuple[int, int, int]) -> None:
        acl = b"".join(
            struct.pack("<HHI", *entry) for entry in [(1, 4, NOBODY), *entries, (16, 4, NOBODY), (32, 0, NOBODY)]
        )
        try:
            os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + acl)
        except OSError as error:
            pytest.skip(f"the file system has no access lists ({error.strerror})")
        assert path.stat().st_mode & 0o077 == 0o040

    give((2, 4, os.geteuid()), (4, 0, NOBODY))
    assert ids(path)
    for others in ([(2, 4, 4711), (4, 0, NOBODY)], [(4, 0, NOBODY), (8, 4, 4711)]):
        give(*others)
        with pytest.raises(InputError, match="can read or write it"):
            ids(path)


def test_no_group_may_write_it(path: Path) -> None:
    path.chmod(0o660)
    with pytest.raises(InputError, match="can read or write it"):
        ids(path)


def test_root_and_this_user_may_own_it_and_nobody_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid == 0:
        assert ids(path)
    else:
        with pytest.raises(InputError, match="not to this one: chown"):
            ids(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused_also_for_root(path: Path) -> None:
    os.chown(path, 4711, 0)
    with pytest.raises(InputError, match="it belongs to user 4711, not to this one: chown 0 "):
        ids(path)


def test_a_link_is_followed_and_what_it_leads_to_is_judged(path: Path, tmp_path: Path) -> None:
    """As Kubernetes mounts a Secret: two links, one of which changes."""
    (tmp_path / "..data").symlink_to(tmp_path)
    link = tmp_path / "mounted"
    link.symlink_to("..data/secret")
    assert ids(link) == [id_of(ONE)]
    path.chmod(0o644)
    with pytest.raises(InputError, match=f"secret file {link}: others can read it"):
        ids(link)


def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, why in (
        ("fifo", "it is not a regular file"),
        (".", "it is not a regular file"),
        ("none", "it cannot be read"),
    ):
        with pytest.raises(InputError, match=f"secret file .*{name}: {why}"):
            ids(tmp_path / name)


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_believed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = SecretFile(str(path), "run")

    def seen() -> list[str]:
        secret.look()
        return [key.id for key in secret.keys]

    assert seen() == [id_of(ONE)]
    write(path, ONE + b"\n" + TWO)
    assert seen() == [id_of(ONE), id_of(TWO)]
    write(path, b"half")
    for _ in range(3):
        assert seen() == [id_of(ONE), id_of(TWO)]
    path.unlink()
    assert len(seen()) == 2
    write(path, TWO)
    assert seen() == [id_of(TWO)]
    messages = [line.getMessage() for line in caplog.records]
    assert len(messages) == 2 and all("the previous one is still used" in line for line in messages)


async def test_it_is_looked_at_while_a_job_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_file, "LOOK_INTERVAL_S", 0.01)
    secret = SecretFile(str(path), "run")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(secret.follow)
        write(path, TWO)
        with anyio.fail_after(DEADLINE_S):
            while secret.keys[0].id != id_of(TWO):  # noqa: ASYNC110  a file has no events here
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


def test_a_key_is_of_one_run_and_its_name_of_none() -> None:
    here, there = Key(ONE, "run"), Key(ONE, "other")
    assert here.id == there.id and here.made_of(b"x", b"y") != there.made_of(b"x", b"y")
    assert ONE.decode() not in here.id and repr(ONE)[2:-1] not in repr(here)


def test_a_service_s_credential_is_found(path: Path, tmp_path: Path) -> None:
    assert default_path({"CREDENTIALS_DIRECTORY": str(tmp_path)}) is None
    path.rename(tmp_path / "aelastic")
    assert default_path({"CREDENTIALS_DIRECTORY": str(tmp_path)}) == str(tmp_path / "aelastic")
    assert default_path({}) is default_path({"CREDENTIALS_DIRECTORY": ""}) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda path: RendezvousSettings("c10d", "node0:1", 1, 2, secret_file=path),
        lambda path: RendezvousSettings("etcd-v3", "node0:1", 1, 2, config={"secret_file": path}),
    ],
)
def test_settings_look_at_it_before_anything_starts(path: Path, make: Callable[[str], RendezvousSettings]) -> None:
    assert make(str(path)).secret_path == str(path)
    path.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        make(str(path))


def test_a_handler_of_torch_s_proves_nothing(path: Path) -> None:
    with pytest.raises(InputError, match=r"torch:c10d does not use the secret file .*: use a back end without torch:"):
        RendezvousSettings("torch:c10d", "node0:1", 1, 2, secret_file=str(path))
