"""Every story file, with the function that runs its stories."""

from __future__ import annotations

from pathlib import Path

from kit.stories import (
    coordinator,
    decisions,
    drains,
    failures,
    group,
    group_events,
    leader,
    member_texts,
    supervisor,
    timeline_texts,
    timers,
)
from kit.stories.files import FOLDER, SHELL_FOLDER, Player

CORE: dict[Path, Player] = {
    path: player
    for folder, player in (
        (FOLDER, coordinator.played),
        (decisions.FOLDER, decisions.played),
        (drains.FOLDER, drains.played),
        (group.FOLDER, group.played),
        (group_events.FOLDER, group_events.played),
        (leader.FOLDER, leader.played),
        (member_texts.FOLDER, member_texts.played),
        (timeline_texts.FOLDER, timeline_texts.played),
        (timers.FOLDER, timers.played),
    )
    for path in sorted(folder.glob("*.txt"))
}
SHELL: dict[Path, Player] = {
    SHELL_FOLDER / "failures.txt": failures.played,
    SHELL_FOLDER / "supervisor.txt": supervisor.played,
}
