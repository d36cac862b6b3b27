"""What a release consists of: packages that are complete and install alone, workflows that call verbs that exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from sources import ROOT, package

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A line is written at once: the workers share a pipe.
SCRIPT = """\
import os, sys, aelastic
sys.stdout.write(f"{aelastic.__file__} {os.environ['RANK']}\\n")
"""
VERSION = re.compile(r"aelastic (\S+) \(torch (\S+|not installed), Python \d+\.\d+\.\d+\)\n")
# A command that takes the package from an index.  Nothing that users read has one before the first release is there;
# docs/development/release.md says what changes then.
FROM_THE_INDEX = re.compile(
    r"\b(?:pip3?|pipx|uv|poetry|pdm) (?:install|add|run|tool install|pip install)\b[^\n`]*?(?<![\w./=-])aelastic(?![\w./*-])[^\n`]*"
)
A_LOCAL_INDEX = re.compile(r"--index-url http://(?:127\.0\.0\.1|localhost)\b|--find-links\b")
IMPORTED = {"py-spy": "py_spy", "prometheus-client": "prometheus_client"}


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution, and the wheel that is built from it."""
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


@pytest.mark.long
@pytest.mark.all
def test_the_wheel_installs_alone_and_runs_a_job(packages: tuple[Path, Path], tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", packages[1], cwd=tmp_path)
    installed = VERSION.fullmatch(run(tmp_path / "venv/bin/aelastic", "--version", cwd=tmp_path))
    assert installed and installed[2] == "not installed" and packages[1].name.startswith(f"aelastic-{installed[1]}-")

    # Its dependencies, torch among them, are lent by this environment; nothing else of it is seen first.
    lent = [path for path in sys.path if path.endswith("site-packages") and (Path(path) / "torch").exists()]
    (home,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (home / "lent.pth").write_text("\n".join(lent) + "\n")
    (tmp_path / "hello.py").write_text(SCRIPT)
    told = run(python, "-m", "aelastic", "--nproc-per-node", "2", "hello.py", cwd=tmp_path)
    assert sorted(told.splitlines()) == [f"{home}/aelastic/__init__.py {rank}" for rank in (0, 1)]


def test_the_version_names_torchs_and_pythons() -> None:
    found = VERSION.fullmatch(run(sys.executable, "-m", "aelastic", "--version", cwd=ROOT))
    assert found and re.match(r"\d+\.\d+", found[1]) and re.match(r"\d+\.\d+", found[2])


def promises(text: str) -> list[str]:
    return [found[0] for found in FROM_THE_INDEX.finditer(text) if not A_LOCAL_INDEX.search(found[0])]


def test_no_page_message_or_recipe_promises_a_package_that_is_not_published() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.*")]
    programs = [path for folder in ("aelastic", "benchmarks", "deploy", "examples") for path in ROOT.glob(f"{folder}/**/*")]
    texts = {path: path.read_text(errors="replace") for path in [*pages, *programs] if path.is_file()}
    assert len(texts) > 200
    found = {str(path.relative_to(ROOT)): said for path, text in texts.items() if (said := promises(text))}
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


def test_workflows_and_hooks_call_verbs_that_exist_and_no_others() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    files = [*ROOT.glob(".github/workflows/*.yml"), ROOT / ".pre-commit-config.yaml"]
    called = {(file.name, line) for file in files for line in re.findall(r"(?:run|entry): ([^\n,]+)", file.read_text())}
    assert len(called) > 9
    assert {each for each in called if each[1] != ".ci/run" and each[1].removeprefix("make ") not in verbs} == set()


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
    known |= {name.partition("-")[0] for name in offered}  # opentelemetry-sdk and its like share a package
    known |= {"yarl", "sitecustomize", "_forkserver"}  # aiohttp's own; modules of ours that are found by path
    assert imported - known == set()
    for needed in PROJECT["dependencies"]:
        assert Requirement(needed).name in imported
    for name in {*extras} - {"report", "recipes"}:  # these serve benchmarks/ and deploy/
        for each in extras[name]:
            assert Requirement(each).name.partition("-")[0] in text, f"{each} of [{name}]"


def test_the_classifiers_name_the_versions_of_python_that_every_change_is_tested_with() -> None:
    named = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)}
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    required = re.findall(r"matrix\.python != '([\d.]+)'", workflow)
    assert named == set(required)
