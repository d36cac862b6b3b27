"""Release contents: packages that are complete and install from an index, workflows that call existing make targets."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matrix
import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version
from sources import ROOT, package

yaml = pytest.importorskip("yaml")  # PyYAML: in the group dev

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A line is written at once: the workers share a pipe.
SCRIPT = """\
import os, sys, aelastic
sys.stdout.write(f"{aelastic.__file__} {os.environ['RANK']}\\n")
"""
VERSION = re.compile(r"aelastic (\S+) \(torch (\S+|not installed), Python \d+\.\d+\.\d+\)\n")
# A command that takes the package from an index.  User documentation has none before the first release;
# docs/development/release.md describes what changes then.
FROM_THE_INDEX = re.compile(
    r"\b(?:pip3?|pipx|uv|poetry|pdm) (?:install|add|run|tool install|pip install)\b[^\n`]*?(?<![\w./=-])aelastic(?![\w./*-])[^\n`]*"
)
A_LOCAL_INDEX = re.compile(r"--index-url http://(?:127\.0\.0\.1|localhost)\b|--find-links\b")
IMPORTED = {"py-spy": "py_spy", "prometheus-client": "prometheus_client"}


WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
PINNED = re.compile(r"uses: ([\w/.-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)\b")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution, and the wheel built from it."""
    if find_spec("hatch_vcs") is None:
        pytest.skip("hatch-vcs is not installed")
    folder = tmp_path_factory.mktemp("dist")
    workflow = {"PROJECT_URL": "https://github.com/someone/aelastic"}
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder, **workflow)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.all
def test_the_packages_are_complete_and_their_metadata_is_valid(packages: tuple[Path, Path]) -> None:
    sdist, wheel = packages
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (home,) = {name.partition("/")[0] for name in names} - {"aelastic"}
        metadata = Metadata.from_email(archive.read(f"{home}/METADATA"), validate=True)
    assert {"aelastic/py.typed", "aelastic/cli/main.py", f"{home}/licenses/LICENSE"} <= set(names)
    assert len([name for name in names if name.endswith(".py")]) == len(package())
    assert (
        metadata.description
        and not re.search(r"\]\(docs/|<picture", metadata.description)
        and len(metadata.requires_dist or ()) > 5
    )
    assert (metadata.project_urls or {})["Issues"] == "https://github.com/someone/aelastic/issues"
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "docs/index.md",
        "mkdocs.yml",
        "tests/docs/test_release.py",
    }
    assert needed <= held and not {name for name in held if ".venv" in name or name.startswith("build/")}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@contextmanager
def local_index(folder: Path, *files: Path) -> Iterator[str]:
    """A package index as anyone can make one: a folder per project, served as is."""
    project = folder / "simple" / "aelastic"
    project.mkdir(parents=True)
    for file in files:
        shutil.copy(file, project)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()


@pytest.mark.long
@pytest.mark.all
def test_wheel_and_source_distribution_install_from_an_index_and_run_a_job(
    packages: tuple[Path, Path], tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    (home,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (tmp_path / "hello.py").write_text(SCRIPT)
    nothing_else = {
        "PYTHONPATH": "",  # the tests may run on a copy of the repository that is in this variable
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "no_proxy": "127.0.0.1",
    }

    def install(index: str, *options: str) -> None:
        words = (
            "--index-url",
            index,
            "--no-deps",
            "--no-cache-dir",
            "--quiet",
            "--force-reinstall",
            *options,
            "aelastic",
        )
        run(python, "-m", "pip", "install", *words, cwd=tmp_path, **nothing_else)

    with local_index(tmp_path, *packages) as index:
        install(index)
        installed = VERSION.fullmatch(run(tmp_path / "venv/bin/aelastic", "--version", cwd=tmp_path, **nothing_else))
        assert installed and installed[2] == "not installed"
        assert packages[1].name.startswith(f"aelastic-{installed[1]}-")

        # This environment lends its dependencies, torch among them; its other packages must not come first.
        lent = [path for path in sys.path if path.endswith("site-packages") and (Path(path) / "torch").exists()]
        (home / "lent.pth").write_text("\n".join(lent) + "\n")
        job = (python, "-m", "aelastic", "--nproc-per-node", "2", "hello.py")
        ranks = [f"{home}/aelastic/__init__.py {rank}" for rank in (0, 1)]
        assert sorted(run(*job, cwd=tmp_path, **nothing_else).splitlines()) == ranks

        install(index, "--no-binary", "aelastic", "--no-build-isolation")
        again = VERSION.fullmatch(run(tmp_path / "venv/bin/aelastic", "--version", cwd=tmp_path, **nothing_else))
        assert again and again[1] == installed[1]
        assert sorted(run(*job, cwd=tmp_path, **nothing_else).splitlines()) == ranks


def test_the_version_is_that_of_the_nearest_tag(tmp_path: Path) -> None:
    if find_spec("hatch_vcs") is None or not (ROOT / ".git").exists():
        pytest.skip("needs hatch-vcs, and a clone: this is no clone")

    def git(*words: str) -> str:
        return run("git", "-c", "user.name=t", "-c", "user.email=t@localhost", *words, cwd=tmp_path / "clone")

    def version() -> str:
        return run(sys.executable, "-m", "hatchling", "version", cwd=tmp_path / "clone").strip()

    run("git", "clone", "--quiet", "--shared", ROOT, tmp_path / "clone", cwd=tmp_path)
    if not git("tag", "--list"):
        assert version().startswith("0.0.1.dev")  # older than the first release
    git("tag", "--annotate", "v0.1.0", "--message", "aelastic 0.1.0", "--force")
    assert version() == "0.1.0"
    git("commit", "--quiet", "--allow-empty", "--message", "the next change")
    assert re.fullmatch(r"0\.1\.1\.dev1\+g[0-9a-f]+", version())


def test_the_version_names_torchs_and_pythons() -> None:
    found = VERSION.fullmatch(run(sys.executable, "-m", "aelastic", "--version", cwd=ROOT))
    assert found and re.match(r"\d+\.\d+", found[1]) and re.match(r"\d+\.\d+", found[2])


def promises(text: str) -> list[str]:
    return [found[0] for found in FROM_THE_INDEX.finditer(text) if not A_LOCAL_INDEX.search(found[0])]


def test_no_page_message_or_recipe_promises_a_package_that_is_not_published() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.*")]
    programs = [
        path for folder in ("aelastic", "benchmarks", "deploy", "examples") for path in ROOT.glob(f"{folder}/**/*")
    ]
    texts = {
        path: path.read_text(errors="replace")
        for path in [*pages, *programs]
        if path.is_file() and path.suffix != ".pyc"
    }
    assert len(texts) > 200
    found = {str(path.relative_to(ROOT)): promised for path, text in texts.items() if (promised := promises(text))}
    assert found == {}


@pytest.mark.parametrize(
    "command, is_one",
    [
        ("pip install aelastic", True),
        ("python -m pip install --upgrade 'aelastic[ui]'", True),
        ("uv add aelastic", True),
        ("uv pip install aelastic==0.1.0", True),
        ("pip install '.[ui]'", False),
        ("pip install dist/aelastic-0.1.0-py3-none-any.whl", False),
        ("pip install wheels/aelastic-*.whl", False),
        ("pip install --index-url http://127.0.0.1:8000/simple aelastic", False),
        ("pip install rich", False),
    ],
)
def test_a_promise_is_a_command_that_asks_an_index_for_the_package(command: str, is_one: bool) -> None:
    assert bool(promises(f"Run `{command}` first.")) == is_one


def jobs(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"]
    return found


def test_workflows_and_hooks_call_verbs_that_exist_and_no_others() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    files = [*WORKFLOWS, ROOT / ".pre-commit-config.yaml"]
    called = {(file.name, line) for file in files for line in re.findall(r"(?:run|entry): ([^\n,]+)", file.read_text())}
    assert len(called) > 9
    others = {".ci/run", ".ci/run test-all"}
    unknown = {
        each
        for each in called
        if each[1] not in others and re.sub(r"make ([\w-]+)( ARGS=\S+)?", r"\1", each[1]) not in verbs
    }
    # Only the hosting site can do this.
    assert {line.split(" --")[0] for _, line in unknown} == {'gh release create "$GITHUB_REF_NAME"'}


def test_actions_are_pinned_to_commits_each_to_one_and_name_their_version() -> None:
    used = [line.strip("- ") for file in WORKFLOWS for line in file.read_text().splitlines() if "uses:" in line]
    pins = {found.groups() for line in used if (found := PINNED.match(line))}
    assert len(used) > 10 and [line for line in used if not PINNED.match(line)] == []
    assert len({action for action, _, _ in pins}) == len(pins)


def test_every_night_all_tests_are_run() -> None:
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert "cron:" in nightly and "run: .ci/run test-all" in nightly
    assert "make test-all" in (ROOT / ".ci/run").read_text()


def test_a_release_is_tested_and_its_packages_are_attested_before_they_are_published() -> None:
    release = jobs("release")
    assert release["publish"]["needs"] == ["test", "build"]
    assert release["publish"]["permissions"] == {
        "id-token": "write"
    }  # trusted publishing, without a token that could leak
    assert {name for name, job in release.items() if "publish" in job.get("needs", [])} == {"announce", "docs"}
    (attested,) = (step for step in release["build"]["steps"] if "attest-build-provenance" in step.get("uses", ""))
    assert attested["with"]["subject-path"] == "dist/*, build/sbom.cdx.json"
    assert release["build"]["permissions"]["attestations"] == "write"


@pytest.mark.all
def test_what_the_package_imports_is_required_and_what_extras_bring_is_used() -> None:
    trees = [module.tree for module in package()]
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for alias in node.names[:1]
    }
    text = "\n".join(module.path.read_text() for module in package())
    extras = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name not in {"dev", "all"}}
    offered = {Requirement(each).name for needs in (PROJECT["dependencies"], *extras.values()) for each in needs}
    known = {*sys.stdlib_module_names, "aelastic", *(IMPORTED.get(name, name.replace("-", "_")) for name in offered)}
    known |= {name.partition("-")[0] for name in offered}  # opentelemetry-sdk and similar packages share a name prefix
    known |= {"yarl", "sitecustomize", "_forkserver"}  # aiohttp's own; modules of ours that are found by path
    known |= {
        "accelerate",
        "lightning",
        "pytorch_lightning",
        "transformers",
    }  # imported for scripts that use them
    assert imported - known == set()
    for needed in PROJECT["dependencies"]:
        assert Requirement(needed).name in imported
    for name in {*extras} - {"report", "recipes"}:  # these serve benchmarks/ and deploy/
        for each in extras[name]:
            assert Requirement(each).name.partition("-")[0] in text, f"{each} of [{name}]"


def test_the_classifiers_name_the_versions_of_python_that_every_change_is_tested_with() -> None:
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert named == jobs("ci")["test"]["strategy"]["matrix"]["python"]
    assert named[0] == PROJECT["requires-python"].removeprefix(">=")
    assert set(named) == {each.python for each in matrix.COMBINATIONS}
    page = (ROOT / "docs/reference/requirements.md").read_text()
    assert f"Python {named[0]} to {named[-1]}" in page


def test_the_page_of_versions_names_the_oldest_and_the_newest_torch_of_the_matrix() -> None:
    torch = sorted((each.torch for each in matrix.COMBINATIONS), key=Version)
    oldest, newest = (version.rpartition(".")[0] for version in (torch[0], torch[-1]))
    assert f"torch>={oldest}" in PROJECT["dependencies"]
    page = (ROOT / "docs/reference/requirements.md").read_text()
    assert f"torch {oldest} to {newest}" in page
    run_with = re.findall(r"^\| [\d.]+ \| (\d+\.\d+\.\d+)", page, re.MULTILINE)
    assert set(torch) <= set(run_with)
