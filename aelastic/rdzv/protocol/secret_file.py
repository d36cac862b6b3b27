"""The file that holds a job's secret: its permissions and its content.

It is checked every second, so that a secret can be changed while a job runs: add a second line on all nodes, make it
the first line, then remove the old one.  The memory that held the content is overwritten at once: a core dump of the
agent contains keys of this run, but never the secret.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence

import anyio

from aelastic.base.loop.threads import run_sync
from aelastic.errors import InputError
from aelastic.rdzv.protocol.keys import Key

_log = logging.getLogger(__name__)

SECRET_BYTES_MIN = 32
SECRETS_MAX = 2
FILE_BYTES_MAX = 4096
LOOK_INTERVAL_S = 1.0
CREDENTIAL = "aelastic"  # the file's name in `CREDENTIALS_DIRECTORY` (systemd.exec(5))
_ACL_USER, _ACL_GROUP_OBJ, _ACL_GROUP = 2, 4, 8  # linux/posix_acl.h
_LINE = re.compile(rb"\S(?:[^\n]*\S)?")  # without white space around it
_HOW = "use one or two lines of at least 32 bytes each (openssl rand -hex 32)"


class SecretFile:
    """The keys of one job, from a file.

    Attributes:
        keys: one or two; the first is used, each is accepted.  While the file cannot be read, the previous ones.

    Args:
        path: the file's path.
        run_id: the job's.

    Raises:
        InputError: others can read the file, or it holds no secret; the message names the fix.
    """

    def __init__(self, path: str, run_id: str) -> None:
        self.path, self._run_id = path, run_id
        self.keys: Sequence[Key]
        self.keys, self._seen = self._read()
        self._trouble = ""

    async def follow(self) -> None:
        """Checks the file repeatedly, in a thread, because its disk may hang.  Runs until cancelled."""
        limiter = anyio.CapacityLimiter(1)
        while True:
            await anyio.sleep(LOOK_INTERVAL_S)
            await run_sync(self.look, abandon_on_cancel=True, limiter=limiter)

    def look(self) -> None:
        """Reads the file again if it has changed."""
        try:
            if _identity(os.stat(self.path)) != self._seen:
                self.keys, self._seen = self._read()
            trouble = ""
        except (OSError, InputError) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            _log.warning(
                "the secret changed and cannot be read; the previous one is still used: %s",
                trouble,
                extra={"topic": "the-secret-file-cannot-be-used"},
            )
        self._trouble = trouble

    def _read(self) -> tuple[list[Key], tuple[int, ...]]:
        data = bytearray(FILE_BYTES_MAX + 1)
        try:
            seen, size = _read_into(data, self.path)
            if size > FILE_BYTES_MAX:
                raise InputError(
                    f"secret file {self.path}: it has more than {FILE_BYTES_MAX} bytes: {_HOW}",
                    topic="the-secret-file-cannot-be-used",
                )
            with memoryview(data) as view:
                lines = [found.span() for found in _LINE.finditer(view[:size])]
                if not 1 <= len(lines) <= SECRETS_MAX or any(e - b < SECRET_BYTES_MIN for b, e in lines):
                    found = ", ".join(str(end - begin) for begin, end in lines) or "none"
                    raise InputError(
                        f"secret file {self.path}: its lines have {found} bytes: {_HOW}",
                        topic="the-secret-file-cannot-be-used",
                    )
                return [Key(view[begin:end], self._run_id) for begin, end in lines], seen
        finally:
            data[:] = bytes(len(data))


def default_path(environ: Mapping[str, str]) -> str | None:
    """Returns the path of the credential that systemd passes to a service, if any."""
    path = os.path.join(environ.get("CREDENTIALS_DIRECTORY", ""), CREDENTIAL)
    return path if environ.get("CREDENTIALS_DIRECTORY") and os.path.lexists(path) else None


def _read_into(data: bytearray, path: str) -> tuple[tuple[int, ...], int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # follows links: the target is checked
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise InputError(
            f"secret file {path}: it cannot be read ({why}): use a file that this user may read",
            topic="the-secret-file-cannot-be-used",
        ) from None
    try:
        found = os.fstat(file)
        if problem := _objection(found, path, _group_rights(file, found.st_mode)):
            raise InputError(f"secret file {path}: {problem}", topic="the-secret-file-cannot-be-used")
        return _identity(found), os.readv(file, [data])
    finally:
        os.close(file)


def _group_rights(file: int, mode: int) -> int:
    """Returns the rights of the file's group, 0 to 7; 7 if an access list names another user or group.

    systemd grants a service's user its credential by such a list (acl(5)); the mode's group bits are then its mask.
    """
    try:
        acl = os.getxattr(file, "system.posix_acl_access")
    except OSError:
        return mode >> 3 & 0o7
    entries = list(struct.iter_unpack("<HHI", acl[4:]))
    if any(tag in {_ACL_USER, _ACL_GROUP} and (tag, who) != (_ACL_USER, os.geteuid()) for tag, _, who in entries):
        return 0o7
    return next((rights for tag, rights, _ in entries if tag == _ACL_GROUP_OBJ), 0)


def _objection(found: os.stat_result, path: str, group_rights: int) -> str:
    """Returns what is wrong with the file's type, owner or permissions, and the fix; empty if nothing is."""
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file: name the file that holds the secret"
    if found.st_uid not in {os.geteuid(), 0}:
        return f"it belongs to user {found.st_uid}, not to this one: chown {os.geteuid()} {path}"
    if mode & stat.S_IRWXO:
        return f"others can read it (mode {mode:04o}): chmod 600 {path}"
    is_own_group = found.st_gid in {os.getegid(), *os.getgroups()}
    if group_rights and not (is_own_group and group_rights == stat.S_IROTH):
        return f"group {found.st_gid} can read or write it (mode {mode:04o}): chmod 600 {path}"
    return ""


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
