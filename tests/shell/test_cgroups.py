"""Out-of-memory kills, from fake cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from aelastic.base.host.oom import OomWatch


class Cgroups:
    """A fake /proc/self/cgroup and /sys/fs/cgroup."""

    def __init__(self, folder: Path, listing: str) -> None:
        self.proc, self.root = folder / "cgroup", folder / "sys"
        self.proc.write_text(listing)
        self.root.mkdir()

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def watch(self) -> OomWatch:
        return OomWatch(self.proc, self.root)


def events(kills: int) -> str:
    return f"low 0\nhigh 3\nmax 41\noom 2\noom_kill {kills}\noom_group_kill 0\n"


def test_a_v2_kill_is_counted_from_the_start_and_explained_once_with_the_limit(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "0::/pod/worker\n")
    cgroups.write("pod/worker/memory.events", events(5))
    cgroups.write("pod/worker/memory.max", "536870912\n")
    watch = cgroups.watch()
    assert (watch.kills_since_start(), watch.explain(-9)) == (0, "")
    cgroups.write("pod/worker/memory.events", events(6))
    assert watch.kills_since_start() == 1
    assert watch.explain(-9) == "the kernel's out-of-memory killer ended it (memory limit 512.0 MiB)"
    assert watch.explain(-9) == ""


def test_a_kill_of_a_workers_child_is_reported_with_the_workers_exit(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "0::/\n")
    cgroups.write("memory.events", events(0))
    watch = cgroups.watch()
    cgroups.write("memory.events", events(2))
    assert watch.explain(1) == "the kernel's out-of-memory killer ended 2 process(es) of its cgroup"
    assert watch.explain(137) == "the kernel's out-of-memory killer ended it"


def test_the_smallest_limit_above_applies_and_max_is_none(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "0::/pod/worker\n")
    cgroups.write("pod/worker/memory.max", "max\n")
    assert (cgroups.watch().limit_bytes(), cgroups.watch().limit_text) == (None, "")
    cgroups.write("pod/memory.max", "4096\n")
    cgroups.write("memory.max", "1024\n")
    assert (cgroups.watch().limit_bytes(), cgroups.watch().limit_text) == (1024, "1.0 KiB")


def test_the_nearest_counter_above_counts_where_the_cgroup_has_none(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "0::/pod/worker\n")
    cgroups.write("pod/worker/cgroup.procs", "")
    cgroups.write("pod/memory.events", events(1))
    watch = cgroups.watch()
    cgroups.write("pod/memory.events", events(4))
    assert watch.kills_since_start() == 3


def test_v1_is_read_where_it_has_the_memory_controller(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "9:name=systemd:/\n4:cpu,memory:/job\n0::/elsewhere\n")
    cgroups.write("memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    cgroups.write("memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    watch = cgroups.watch()
    assert watch.limit_bytes() is None
    cgroups.write("memory/memory.limit_in_bytes", "2147483648\n")
    assert watch.limit_text == "2.0 GiB"
    cgroups.write("memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 8\n")
    assert watch.kills_since_start() == 1


@pytest.mark.parametrize("listing", ["0::/docker/0123abcd\n", "0::/../..\n", "0::/\n"])
def test_a_path_that_is_not_mounted_here_falls_back_to_the_mount(tmp_path: Path, listing: str) -> None:
    cgroups = Cgroups(tmp_path, listing)
    cgroups.write("memory.events", events(0))
    watch = cgroups.watch()
    cgroups.write("memory.events", events(1))
    assert watch.kills_since_start() == 1


@pytest.mark.parametrize(
    "listing", ["", "nonsense\n\n::\n", "0::/gone\n", "4:memory:/\n", "0::/\x00\n", "0::/" + "x" * 5000]
)
def test_a_host_that_tells_nothing_explains_nothing(tmp_path: Path, listing: str) -> None:
    watch = Cgroups(tmp_path, listing).watch()
    assert (watch.kills_since_start(), watch.limit_bytes(), watch.explain(-9)) == (0, None, "")
    assert OomWatch(tmp_path / "none", tmp_path / "none").explain(-9) == ""


@pytest.mark.parametrize(
    "text", ["", "oom_kill\n", "oom_kill many\n", "oom_kill -1\n", "oom_kill " + "9" * 5000, "\xff\xfe"]
)
def test_a_counter_that_is_not_a_number_counts_nothing(tmp_path: Path, text: str) -> None:
    cgroups = Cgroups(tmp_path, "0::/\n")
    cgroups.write("memory.events", events(0))
    watch = cgroups.watch()
    cgroups.write("memory.events", text)
    assert watch.kills_since_start() == 0


def test_a_cgroup_outside_the_namespace_is_not_looked_for_outside_the_mount(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "0::/..\n")
    cgroups.write("memory.max", "4096\n")
    cgroups.write("../memory.max", "1024\n")
    assert cgroups.watch().limit_bytes() == 4096


def test_a_cgroup_that_was_made_again_does_not_count_backwards(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "0::/\n")
    cgroups.write("memory.events", events(9))
    watch = cgroups.watch()
    cgroups.write("memory.events", events(0))
    assert (watch.kills_since_start(), watch.explain(-9)) == (0, "")
