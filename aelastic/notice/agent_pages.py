"""The agent's end of the pages that workers share with it (`aelastic.notice`): a file for each worker of a generation.

Read and written through a descriptor, not mapped: a script that cuts its file short would kill an agent that maps it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from aelastic.notice.page import BYTES, CALLS, FORM, FORM_1, NONE, PHASE, PID, SAVE, SAVE_AT, SAVED_AT

_WORD = struct.Struct("q")
_WORDS = struct.Struct("8q")


class NoticePages:
    """Those of the present generation, by local rank.

    Args:
        folder: where their files lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[int, Path] = {}
        self._fds: dict[int, int] = {}
        self.generation, self.phase, self.save_at, self.kill_at = 0, NONE, 0, 0.0

    def begin(self, generation: int, local_ranks: Sequence[int]) -> Mapping[int, str]:
        """Makes the pages of a generation; gives their paths, by local rank.  One that cannot be made is left out."""
        self.close()
        self.generation = generation
        for rank in local_ranks:
            path = self._folder / f"notice_{generation}_{rank}"
            with suppress(OSError):
                self._fds[rank] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                self._paths[rank] = path
                os.ftruncate(self._fds[rank], BYTES)
                self._write(rank, FORM, FORM_1)
        return {rank: str(path) for rank, path in self._paths.items()}

    def set_phase(self, phase: int, save_at: int = 0, kill_at: float = 0.0) -> None:
        """Holds all ranks at their next call, names the call at which they save, or lets them go on.

        Args:
            save_at: that call.
            kill_at: when ranks are killed that have not ended after it.
        """
        self.phase, self.save_at = phase, save_at if phase == SAVE else 0 if phase == NONE else self.save_at
        self.kill_at = kill_at
        for rank in self._fds:
            if phase == SAVE:
                self._write(rank, SAVE_AT, save_at)
            self._write(rank, PHASE, phase)

    def calls(self) -> Mapping[int, int]:
        """How often ranks have asked, of those that have, by local rank."""
        seen = {rank: self._look(rank) for rank in self._fds}
        return {rank: words[CALLS] for rank, words in seen.items() if words and words[PID]}

    def saved(self) -> set[int]:
        """Local ranks that have acknowledged the call at which they were to save."""
        seen = {rank: self._look(rank) for rank in self._fds}
        return {rank for rank, words in seen.items() if words and words[SAVED_AT] == self.save_at > 0}

    def is_saving(self, rank: int) -> bool:
        """Whether a local rank is at the call at which it is to save, or has ended there."""
        words = self._look(rank) if rank in self._fds and self.phase == SAVE else ()
        return bool(words) and words[CALLS] == self.save_at > 0

    def _look(self, rank: int) -> Sequence[int]:
        """All words; none if the script has destroyed them."""
        data = os.pread(self._fds[rank], BYTES, 0)
        words = _WORDS.unpack(data) if len(data) == BYTES else (0,)
        return words if words[FORM] == FORM_1 else ()

    def _write(self, rank: int, word: int, value: int) -> None:
        with suppress(OSError):  # its disk is full, or gone: the worker sees nothing of it
            os.pwrite(self._fds[rank], _WORD.pack(value), word * _WORD.size)

    def close(self) -> None:
        for rank, fd in self._fds.items():
            os.close(fd)
            self._paths[rank].unlink(missing_ok=True)
        self._paths, self._fds, self.phase, self.save_at = {}, {}, NONE, 0
