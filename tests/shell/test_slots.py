"""At most as many tests with processes run at a time as there are slots."""

from __future__ import annotations

import threading
from pathlib import Path

from kit.slots import Slots
from kit.waiting import DEADLINE_S


def test_who_finds_no_slot_free_waits_until_one_is_released(tmp_path: Path) -> None:
    first, second = Slots(tmp_path, 2), Slots(tmp_path, 2)
    taken = [first.acquire(), second.acquire()]
    assert sorted(taken) == [0, 1]
    third = Slots(tmp_path, 2)
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(third.acquire()))
    waiting.start()
    assert not got
    second.release(taken[1])
    waiting.join(DEADLINE_S)
    assert got == [taken[1]]
    third.release(got[0])
    first.release(taken[0])


def test_the_slot_of_a_holder_that_died_is_free(tmp_path: Path) -> None:
    first, second = Slots(tmp_path, 1), Slots(tmp_path, 1)
    assert first.acquire() == 0
    first.close()  # as the kernel does when a process ends
    assert second.acquire() == 0
    second.close()
