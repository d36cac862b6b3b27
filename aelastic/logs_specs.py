"""Where the output of workers goes: torch's `LogsSpecs` and related classes, without torch.

The names, their fields, defaults and errors are those of `torch.distributed.elastic.multiprocessing`; objects of either
kind work for `WorkerSpec.logs_specs`.  In a `LogsDest`, paths are by local rank; `""` is the agent's own stream.

Layout: `<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from aelastic.diagnose.failures.failure import ERROR_FILE_VARIABLE
from aelastic.errors import InputError
from aelastic.settings import Std as Std  # noqa: PLC0414  this is also its documented place
from aelastic.settings import Streams, streams_of

_log = logging.getLogger(__name__)

INHERITED = ""
Envs = dict[int, dict[str, str]]


@dataclass
class LogsDest:
    """Destinations of the output of one attempt (torch: `LogsDest`).  Paths are by local rank.

    Args:
        stdouts: files that workers write stdout to; empty: the agent's own stream.
        stderrs: the same for stderr.
        tee_stdouts: files of stdout that also appear on the console.
        tee_stderrs: the same for stderr.
        error_files: files in which workers record their exceptions.
        filtered_stdout: file for lines that match `duplicate_stdout_filters`.
        filtered_stderr: the same for stderr.
    """

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """Decides where the output of workers goes (torch: `LogsSpecs`).

    Args:
        log_dir: folder for the output.
        redirects: streams that go only to files, for all workers or by local rank.
        tee: streams that go to files and to the console.
        local_ranks_filter: local ranks whose output appears on the console; `None` or empty: all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Streams = Std.NONE,
        tee: Streams = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: Envs) -> LogsDest:
        """Creates the folders of the next attempt, and returns its files.

        Args:
            envs: the complete environments of the workers, by local rank; set `TORCHELASTIC_ERROR_FILE` in each.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The folder that holds the output of all runs."""


class DefaultLogsSpecs(LogsSpecs):
    """Creates folders for each run, attempt and rank within `log_dir` (torch: `DefaultLogsSpecs`).

    Args:
        log_dir: created if missing; `None`: a new temporary folder, which is kept; `/dev/null`: nothing is kept.

    Raises:
        NotADirectoryError: `log_dir` is a file.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Streams = Std.NONE,
        tee: Streams = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if not log_dir:
            log_dir = tempfile.mkdtemp(prefix="torchelastic_")
        elif os.path.isfile(log_dir):
            raise NotADirectoryError(f"log_dir: {log_dir} is a file: use a folder")
        elif log_dir != os.devnull:
            os.makedirs(log_dir, exist_ok=True)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: Envs) -> LogsDest:
        """Creates the folder of the next attempt, with one folder per rank."""
        if self._root_log_dir == os.devnull:
            return _nowhere(envs)
        facts = envs.get(0, {})
        if self._run_log_dir is None:
            os.makedirs(self.root_log_dir, exist_ok=True)
            prefix = f"{name_of_run(facts.get('TORCHELASTIC_RUN_ID', 'test_run_id'))}_"
            self._run_log_dir = tempfile.mkdtemp(prefix=prefix, dir=self.root_log_dir)
            _log.info("worker output is kept in %s", self._run_log_dir)
        folder = os.path.join(self._run_log_dir, f"attempt_{facts.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        shutil.rmtree(folder, ignore_errors=True)
        return lay_out(folder, envs, self._redirects, self._tee, self._local_ranks_filter)

    def _choices(self) -> tuple[object, ...]:
        return self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter

    def __repr__(self) -> str:
        names = ("root_log_dir", "redirects", "tee", "local_ranks_filter")
        pairs = (f"{name}={value}" for name, value in zip(names, self._choices(), strict=True))
        return f"DefaultLogsSpecs({', '.join(pairs)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DefaultLogsSpecs) and self._choices() == other._choices()

    __hash__ = None  # type: ignore[assignment]  # as torch's: its choices may be dicts


class UnaskedLogsSpecs(DefaultLogsSpecs):
    """The default `logs_specs` of a `LaunchConfig`: creates its folder on first use."""

    def __init__(self) -> None:
        LogsSpecs.__init__(self)
        self._run_log_dir = None

    @property
    def has_folder(self) -> bool:
        return self._root_log_dir is not None

    @property
    def root_log_dir(self) -> str:
        if self._root_log_dir is None:
            self._root_log_dir = tempfile.mkdtemp(prefix="torchelastic_")
        return self._root_log_dir

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None


def name_of_run(run_id: str) -> str:
    """Returns the run id in a form that is safe in a folder name."""
    return re.sub(r"[^\w.-]", "_", run_id)


def lay_out(
    folder: str, envs: Envs, redirects: Streams, tee: Streams, local_ranks_filter: Collection[int] | None
) -> LogsDest:
    """Creates the folders of one attempt, names their files, and sets each worker's error file in its environment.

    Output of a rank outside the filter is dropped, unless it is kept in a file.
    """
    os.makedirs(folder)
    dest = LogsDest(
        filtered_stdout=os.path.join(folder, "filtered_stdout.log"),
        filtered_stderr=os.path.join(folder, "filtered_stderr.log"),
    )
    for rank in range(len(envs)):
        rank_folder = os.path.join(folder, str(rank))
        os.mkdir(rank_folder)
        is_hidden = bool(local_ranks_filter) and rank not in (local_ranks_filter or ())
        for stream, paths, teed, name in (
            (Std.OUT, dest.stdouts, dest.tee_stdouts, "stdout.log"),
            (Std.ERR, dest.stderrs, dest.tee_stderrs, "stderr.log"),
        ):
            is_teed = stream in streams_of(tee, rank)
            if is_teed or stream in streams_of(redirects, rank):
                paths[rank] = os.path.join(rank_folder, name)
            else:
                paths[rank] = os.devnull if is_hidden else INHERITED
            if is_teed and not is_hidden:
                teed[rank] = paths[rank]
        dest.error_files[rank] = envs[rank][ERROR_FILE_VARIABLE] = os.path.join(rank_folder, "error.json")
    return dest


def _nowhere(envs: Envs) -> LogsDest:
    """Returns torch's result for `/dev/null`: workers write to the console themselves, and keep no error files."""
    for env in envs.values():
        env[ERROR_FILE_VARIABLE] = ""
    return LogsDest(
        stdouts=dict.fromkeys(envs, INHERITED),
        stderrs=dict.fromkeys(envs, INHERITED),
        tee_stdouts=dict.fromkeys(envs, os.devnull),
        tee_stderrs=dict.fromkeys(envs, os.devnull),
        error_files=dict.fromkeys(envs, os.devnull),
        filtered_stdout=os.path.join(os.devnull, "filtered_stdout.log"),
        filtered_stderr=os.path.join(os.devnull, "filtered_stderr.log"),
    )


# The user's objects.


def check_logs_specs(specs: Any) -> None:
    """Rejects an object that is not a `LogsSpecs`.

    Raises:
        InputError: it has no `reify`.
    """
    if isinstance(specs, type) or not callable(getattr(specs, "reify", None)):
        raise InputError(
            f"logs_specs is {specs!r}: pass an object with torch's `reify(envs)`, such as DefaultLogsSpecs(log_dir)",
            topic="a-logs_specs-object-does-not-work",
        )


def ask(specs: Any, envs: Envs) -> LogsDest:
    """Calls the user's `reify`, and checks what it returns.  May block.

    Raises:
        InputError: it raised, or did not return a `LogsDest` for these workers.
        OSError: it raised one.
    """
    name = type(specs).__qualname__
    try:
        answer = specs.reify(envs)
    except OSError:
        raise
    except Exception as error:
        raise InputError(
            f"logs_specs: {name}.reify failed: {type(error).__name__}: {error}",
            topic="a-logs_specs-object-does-not-work",
        ) from error
    try:
        return _read_dest(answer, set(envs))
    except ValueError as reason:
        raise InputError(
            f"logs_specs: {name}.reify returned {reason}", topic="a-logs_specs-object-does-not-work"
        ) from None


def _read_dest(answer: Any, ranks: set[int]) -> LogsDest:
    if not hasattr(answer, "stdouts") or not hasattr(answer, "stderrs"):
        raise ValueError(f"{answer!r}, which is not a LogsDest")
    values = {each.name: getattr(answer, each.name, None) for each in fields(LogsDest)}
    found: dict[str, Any] = {
        name: _path(name, value) if name.startswith("filtered_") else _paths(name, value, ranks)
        for name, value in values.items()
    }
    return LogsDest(**found)


def _paths(name: str, value: Any, ranks: set[int]) -> dict[int, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r}, which is not a dict of paths by local rank")  # noqa: TRY004  one sort here
    if strange := set(value) - ranks:
        raise ValueError(f"{name} for local rank {', '.join(map(str, strange))}: ranks here are 0 to {len(ranks) - 1}")
    return {rank: _path(f"{name}[{rank}]", path) for rank, path in value.items()}


def _path(name: str, value: Any) -> str:
    if value is None:
        return INHERITED
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise ValueError(f"{name}={value!r}, which is not a path")
    return os.fspath(value) if isinstance(value, str) else str(value)
