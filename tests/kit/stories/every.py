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
from kit.stories.files import FOLDER, SHELL_FOLDER, Teller

CORE: dict[Path, Teller] = {
    path: told
    for folder, told in (
        (FOLDER, coordinator.told),
        (decisions.FOLDER, decisions.told),
        (drains.FOLDER, drains.told),
        (group.FOLDER, group.told),
        (group_events.FOLDER, group_events.told),
        (leader.FOLDER, leader.told),
        (member_texts.FOLDER, member_texts.told),
        (timeline_texts.FOLDER, timeline_texts.told),
        (timers.FOLDER, timers.told),
    )
    for path in sorted(folder.glob("*.txt"))
}
SHELL: dict[Path, Teller] = {
    SHELL_FOLDER / "failures.txt": failures.told,
    SHELL_FOLDER / "supervisor.txt": supervisor.told,
}
