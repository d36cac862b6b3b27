"""The descendants of a process, from the kernel (`/proc/PID/task/TID/children` in proc(5))."""

from __future__ import annotations

import os


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on, including zombies."""
    found: list[int] = []
    parents = [pid]
    while parents:
        children = children_of(parents.pop())
        found += children
        parents += children
    return found


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children += map(int, file.read().split())
    except OSError:
        pass  # it has ended
    return children
