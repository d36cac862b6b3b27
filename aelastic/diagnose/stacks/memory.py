"""Reads the memory of a process, which need not help or even run: nothing is stopped, nothing is sent.

Linux lets a process read that of its descendants, even if `kernel.yama.ptrace_scope` is 1 and in a container
without capabilities, if both have the same user; `ptrace(2)`, "Ptrace access mode checking".
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from functools import cache

WORD_BYTES = 8


class Unreadable(Exception):
    """Memory cannot be read; the message gives the reason."""


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Memory:
    """The memory of one process.

    Args:
        pid: its id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def read(self, address: int, size: int) -> bytes:
        """Reads this many bytes.

        Raises:
            Unreadable: it has no such memory, or the kernel lets nobody read it.
        """
        into = ctypes.create_string_buffer(size)
        here, there = _Piece(ctypes.addressof(into), size), _Piece(address, size)
        got = _libc().process_vm_readv(self.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got != size:
            reason = os.strerror(ctypes.get_errno()) if got < 0 else "Bad address"
            raise Unreadable(f"cannot read its memory ({reason})")
        return into.raw

    def word(self, address: int) -> int:
        """Returns the word, usually a pointer, at an address."""
        return self.words(address, 1)[0]

    def words(self, address: int, count: int) -> tuple[int, ...]:
        """Returns this many words."""
        return struct.unpack(f"={count}Q", self.read(address, count * WORD_BYTES))

    def image_at(self, address: int) -> tuple[str, int]:
        """Returns the file that is loaded at an address, as device and inode, and the address at which it begins."""
        images = [(begin, image) for begin, image in self._images() if begin <= address]
        if not images:
            raise Unreadable("no program is loaded there")
        image = max(images)[1]
        return image, min(begin for begin, each in images if each == image)

    def base_of(self, image: str) -> int:
        """Returns where a file is loaded; 0 if it is not."""
        return min((begin for begin, each in self._images() if each == image), default=0)

    def _images(self) -> Iterator[tuple[int, str]]:
        try:
            with open(f"/proc/{self.pid}/maps") as maps:
                for line in maps:
                    addresses, _, _, device, inode, *_ = line.split(maxsplit=5)
                    if inode != "0":
                        yield int(addresses.partition("-")[0], 16), f"{device} {inode}"
        except OSError as error:
            raise Unreadable(f"cannot read what it has loaded ({error.strerror})") from None


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    pieces, count = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_readv.argtypes = [ctypes.c_int, pieces, count, pieces, count, ctypes.c_ulong]
    return libc
