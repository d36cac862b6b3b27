"""The terminals on which these tests start jobs."""

from __future__ import annotations

import os

from kit.screens import Screen


def test_a_terminal_that_is_ended_twice_closes_no_descriptor_of_another() -> None:
    screen = Screen()
    numbers = screen.ours, screen.theirs
    screen.end()
    others = [os.dup2(0, number) for number in numbers]
    screen.end()
    for other in others:
        os.close(other)  # it is still open
