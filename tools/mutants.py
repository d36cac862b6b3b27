"""Puts small bugs into the product, one at a time, and reports which of them the tests find: `make mutants`.

`tools/mutants/` has one diff for each bug; its first line says what is wrong.  Each is applied to a copy of the working
tree, never to the tree itself, and the tests without processes run there until one fails.  A mutant that no test finds
has **lived**: a test is missing.  One that does not apply is **stale**, and needs to be written again.

What each ring found is in `tools/mutants/found.json`.  A run fails if a mutant that was found before lives now.

    make mutants                                all of them; takes an hour or more
    make mutants ARGS="--only 'forming.*'"      those whose names match
    make mutants ARGS="--record"                writes found.json anew, for the mutants that ran

The unchanged tree runs first, once for each state of the tree: it shows that the tests pass, which of them reach which
lines, and what each takes.  A mutant then runs only those that reach what it changes: by ring, the quickest first.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from sources import ROOT

MUTANTS = ROOT / "tools" / "mutants"
FOUND = MUTANTS / "found.json"
BUILD = ROOT / "build" / "mutants"
RESULTS = ROOT / "build" / "mutants.json"
RINGS = ("core", "property", "shell", "simulation", "torch")
# Of the ring torch, those of the worker's side of recovery in place that start no process.
TORCH = ("consequence", "fingerprint", "group_sockets", "kept", "shared_state", "sharing", "vote")
# They compare pages with the code, and so find every change to it.
GENERATED = ("generated_pages", "layers", "troubleshooting", "references")
LIVED, STALE, BROKEN = "lived", "stale", "broken"
# A test that uses much more CPU time than on the unchanged tree hangs.
HANG_TIMES, HANG_MIN_S = 20.0, 10.0
CACHES = {"cache", "lru_cache"}
OPTIONS = (
    "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not all", "--hypothesis-seed=0", "--timeout=900",
)  # fmt: skip
HUNK = re.compile(r"@@ -(\d+)")


@dataclass(frozen=True)
class Mutant:
    """One bug."""

    name: str
    path: str  # of the file that it changes, in the tree
    sentence: str  # what is wrong
    diff: Path

    @classmethod
    def read(cls, diff: Path) -> Mutant:
        lines = diff.read_text().splitlines()
        changed = [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]
        if len(changed) != 1:
            raise ValueError(f"{diff.name} changes {len(changed)} files: one is allowed")
        return cls(diff.stem, changed[0], lines[0], diff)


@dataclass
class Reach:
    """What the tests of the unchanged tree do.

    Args:
        seconds: of CPU time that each test takes, by its node id, in the order of the run.
        tests: those that reach a line, as places in that order; by file and line.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Reach:
        said = json.loads(path.read_text())
        return cls(said["seconds"], {file: {int(k): v for k, v in of.items()} for file, of in said["tests"].items()})

    def of(self, path: str, lines: Iterable[int]) -> list[str]:
        """Tests that reach one of these lines of a file: by ring, the quickest first."""
        known = self.tests.get(path, {})
        order = list(self.seconds)
        reaching = {order[place] for line in lines for place in known.get(line, ())}
        return sorted(reaching, key=lambda test: (RINGS.index(ring_of(test)), self.seconds[test]))


@dataclass(frozen=True)
class Result:
    """What has become of a mutant."""

    name: str
    found_by: str  # a ring, or `LIVED`, `STALE`, `BROKEN`
    test: str = ""  # that has found it
    tests: int = 0  # that reach it
    cpu_s: float = 0.0


def ring_of(test: str) -> str:
    return test.split("/")[1]


def read_mutants(folder: Path = MUTANTS) -> list[Mutant]:
    return [Mutant.read(diff) for diff in sorted(folder.glob("*.diff"))]


# What a mutant changes.


def reach_of_change(before: str, after: str) -> set[int]:
    """Lines of a module such that a test that reaches none of them cannot see its change.

    Those of the innermost function around each change.  Where there is none, or where its results are kept from one
    test to the next, all lines of the module.
    """
    every = set(range(1, before.count("\n") + 2))
    functions = [
        node for node in ast.walk(ast.parse(before)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines: set[int] = set()
    for line in changed_lines(before, after):
        around = [each for each in functions if each.body[0].lineno <= line <= (each.end_lineno or 0)]
        if not around or any(_is_kept(each) for each in around):
            return every
        innermost = max(around, key=lambda each: each.lineno)
        lines |= set(range(innermost.body[0].lineno, (innermost.end_lineno or 0) + 1))
    return lines


def applied(text: str, diff: str) -> str | None:
    """A file with the hunks of a unified diff, wherever their lines have moved to; `None` if they are not there."""
    lines = text.splitlines(keepends=True)
    moved = 0  # by the hunks before
    for begin, hunk in hunks_of(diff):
        old = [line[1:] for line in hunk if line[0] in " -"]
        new = [line[1:] for line in hunk if line[0] in " +"]
        places = [at for at in range(len(lines) - len(old) + 1) if lines[at : at + len(old)] == old]
        if not places:
            return None
        place = min(places, key=lambda at: abs(at - (begin - 1 + moved)))
        lines[place : place + len(old)] = new
        moved = place - (begin - 1) + len(new) - len(old)
    return "".join(lines)


def hunks_of(diff: str) -> Iterator[tuple[int, list[str]]]:
    """Each with the number of its first line in the file before."""
    begin, hunk = 0, list[str]()
    for line in diff.splitlines(keepends=True):
        if found := HUNK.match(line):
            if hunk:
                yield begin, hunk
            begin, hunk = int(found[1]), []
        elif begin and line[0] in " +-":
            hunk.append(line)
    if hunk:
        yield begin, hunk


def changed_lines(before: str, after: str) -> list[int]:
    """Numbers of the lines that are changed or removed, or after which something is added."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    lines: list[int] = []
    for tag, begin, end, _, _ in matcher.get_opcodes():
        if tag != "equal":
            lines += range(begin + 1, max(end, begin + 1) + 1) if end > begin else [begin]
    return lines


def _is_kept(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its results are kept: the first test that calls it is the only one that reaches it."""
    parts = (part for decorator in function.decorator_list for part in ast.walk(decorator))
    return any(isinstance(part, ast.Name) and part.id in CACHES for part in parts)


# The comparison with what was found before.


def lost(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Names of mutants that were found before, and have lived now."""
    return [name for name, found_by in now.items() if found_by == LIVED and before.get(name) in RINGS]


def merged(before: dict[str, str], now: dict[str, str], known: Iterable[str]) -> dict[str, str]:
    """What is recorded after a run: of mutants that have not run, what was; nothing of those that are gone."""
    ran = {name: found_by for name, found_by in now.items() if found_by in {*RINGS, LIVED}}
    return {name: found_by for name, found_by in sorted({**before, **ran}.items()) if name in set(known)}


def table(results: Sequence[Result]) -> str:
    """How many mutants were found, by which rings, and how many were not."""
    counts = Counter(result.found_by for result in results)
    by_ring = ", ".join(f"{counts[ring]} by {ring}" for ring in RINGS if counts[ring])
    found = f"{sum(counts[ring] for ring in RINGS)} found"
    others = [f"{counts[what]} {what}" for what in (LIVED, STALE, BROKEN) if counts[what]]
    return f"{len(results)} mutants: {', '.join([f'{found} ({by_ring})' if by_ring else found, *others])}"


# Running the tests.


class Scratch:
    """A copy of the working tree, in which mutants are made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._age = 0

    @classmethod
    def make(cls, folder: Path) -> Scratch:
        for name in tracked_files():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        return cls(folder)

    def copy(self, folder: Path) -> Scratch:
        shutil.copytree(self.folder, folder, symlinks=True)
        return Scratch(folder)

    def apply(self, mutant: Mutant) -> tuple[str, str] | None:
        """Makes a mutant; gives the file before and after, or `None` if the diff does not apply."""
        path = self.folder / mutant.path
        before = path.read_text() if path.exists() else ""
        after = applied(before, mutant.diff.read_text())
        if after is None:
            return None
        self.write(mutant.path, after)
        return before, after

    def write(self, name: str, text: str) -> None:
        """Writes a file with a time of its own: Python knows by time and size whether to compile it again."""
        path = self.folder / name
        path.write_text(text)
        self._age += 2
        moment = path.stat().st_mtime + self._age
        os.utime(path, (moment, moment))


def tracked_files() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def state_of_tree() -> str:
    """Differs whenever a test might end in another way."""
    digest = hashlib.sha256()
    for name in sorted(tracked_files()):
        if name.startswith(("aelastic/", "tests/")) or name == "pyproject.toml":
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def start_pytest(folder: Path, args: Sequence[str], plan: dict[str, object], log: Path) -> int:
    """Runs pytest in a copy, in a process of its own: forked, since the imports take longer than most runs."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # The package of this tree is installed, too: the copy comes first.
        os.environ["PYTHONPATH"] = str(folder)  # noqa: TID251  environments are what it makes
        sys.path[:0] = [str(folder), str(folder / "tests")]
        del sys.modules["sources"]  # it is of this tree
        status = run_pytest(folder, args, plan)
    except BaseException:  # noqa: BLE001  it is in the log, and the status says so
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_pytest(folder: Path, args: Sequence[str], plan: dict[str, object]) -> int:
    import pytest
    from mutant_run import MutantRun

    return int(pytest.main([*OPTIONS, *args], plugins=[MutantRun(folder, plan)]))


def run_unchanged(scratch: Scratch, folder: Path) -> Reach:
    """The tests of the unchanged tree: what each takes, and reaches."""
    files = [f"tests/{ring}" for ring in RINGS if ring != "torch"]
    files += [f"tests/torch/test_{name}.py" for name in TORCH]
    ignored = [f"--ignore=tests/core/test_{name}.py" for name in GENERATED]
    data, report = folder / "coverage", folder / "unchanged.json"
    os.environ["COVERAGE_FILE"] = str(data)  # noqa: TID251  likewise
    args = [*files, *ignored, "--cov=aelastic", "--cov-context=test", "--cov-report="]
    log = folder / "unchanged.log"
    _, status = os.waitpid(start_pytest(scratch.folder, args, {"report": str(report)}, log), 0)
    if status:
        sys.exit(f"mutants: the tests fail without any mutant; see {log}")
    return reach_from(data, scratch.folder, json.loads(report.read_text())["seconds"])


def reach_from(data: Path, folder: Path, seconds: dict[str, float]) -> Reach:
    import coverage

    measured = coverage.CoverageData(str(data))
    measured.read()
    place_of = {test: place for place, test in enumerate(seconds)}
    reach = Reach(seconds)
    for file in measured.measured_files():
        lines = {
            line: sorted({place_of[test] for each in contexts if (test := each.rpartition("|")[0]) in place_of})
            for line, contexts in measured.contexts_by_lineno(file).items()
        }
        reach.tests[str(Path(file).relative_to(folder))] = {line: tests for line, tests in lines.items() if tests}
    return reach


def run_mutants(
    mutants: Sequence[Mutant], scratches: Sequence[Scratch], reach: Reach, folder: Path
) -> Iterator[Result]:
    """The results, as they come: one mutant at a time in each copy."""
    waiting, free = list(mutants), list(scratches)
    running: dict[int, tuple[Mutant, Scratch, str, int]] = {}  # by process: also the file before, and how many tests
    while waiting or running:
        while waiting and free:
            mutant, scratch = waiting.pop(0), free.pop()
            change = scratch.apply(mutant)
            tests = [] if change is None else reach.of(mutant.path, reach_of_change(*change))
            if change is None or not tests:
                if change is not None:
                    scratch.write(mutant.path, change[0])
                free.append(scratch)
                yield Result(mutant.name, STALE if change is None else LIVED)
                continue
            report = folder / f"{mutant.name}.json"
            report.unlink(missing_ok=True)
            limits = {test: max(HANG_MIN_S, HANG_TIMES * reach.seconds[test]) for test in tests}
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            plan: dict[str, object] = {"report": str(report), "tests": limits}
            pid = start_pytest(scratch.folder, ["-x", *files], plan, folder / f"{mutant.name}.log")
            running[pid] = mutant, scratch, change[0], len(tests)
        if running:
            pid, status, usage = os.wait3(0)
            mutant, scratch, before, count = running.pop(pid)
            scratch.write(mutant.path, before)
            free.append(scratch)
            yield result_of(mutant, status, usage, count, folder)


def result_of(mutant: Mutant, status: int, usage: resource.struct_rusage, count: int, folder: Path) -> Result:
    report = folder / f"{mutant.name}.json"
    cpu_s = round(usage.ru_utime + usage.ru_stime, 1)
    test = json.loads(report.read_text())["failed"] if report.exists() else ""
    if status == 0:
        return Result(mutant.name, LIVED, "", count, cpu_s)
    if not test or "::" not in test:  # pytest itself failed, or a module cannot be imported any more
        return Result(mutant.name, BROKEN, test, count, cpu_s)
    return Result(mutant.name, ring_of(test), test, count, cpu_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="mutants whose names match")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many run at a time")
    parser.add_argument("--record", action="store_true", help="write what was found to tools/mutants/found.json")
    args = parser.parse_args(argv)
    every = read_mutants()
    mutants = [each for each in every if not args.only or any(fnmatch(each.name, glob) for glob in args.only)]
    if not mutants:
        parser.error("no mutant has such a name")
    import_early()
    BUILD.mkdir(parents=True, exist_ok=True)
    before: dict[str, str] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        first = Scratch.make(Path(folder, "0"))
        reach = known_reach(first)
        scratches = [first, *(first.copy(Path(folder, str(number))) for number in range(1, args.jobs))]
        for result in run_mutants(mutants, scratches, reach, BUILD):
            results.append(result)
            print(f"{result.name:<48} {result.found_by:<10} {result.cpu_s:>6.1f} s  {result.test}", flush=True)
            RESULTS.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    now = {result.name: result.found_by for result in results}
    sentences = {mutant.name: mutant.sentence for mutant in mutants}
    print(table(results))
    for result in results:
        if result.found_by in {LIVED, STALE, BROKEN}:
            print(f"{result.found_by}: {result.name}: {sentences[result.name]}")
    missed = lost(before, now)
    for name in missed:
        print(f"found before by {before[name]}, and not now: {name}: {sentences[name]}")
    if args.record:
        FOUND.write_text(json.dumps(merged(before, now, [each.name for each in every]), indent=1) + "\n")
    are_whole = not {STALE, BROKEN} & set(now.values())
    return int(bool(missed) or not are_whole)


def known_reach(scratch: Scratch) -> Reach:
    """Of the tree as it is: from an earlier run, or from one now."""
    path = BUILD / f"reach-{state_of_tree()}.json"
    if not path.exists():
        print("running the tests without any mutant", flush=True)
        for older in BUILD.glob("reach-*.json"):
            older.unlink()
        run_unchanged(scratch, BUILD).save(path)
    return Reach.load(path)


def import_early() -> None:
    """What each run would import again: nothing of this project, and nothing with a plugin, which pytest rewrites."""
    import aiohttp
    import pytest
    import uvloop

    assert all((aiohttp, pytest, uvloop))
    assert "aelastic" not in sys.modules


if __name__ == "__main__":
    sys.exit(main())
