"""Under other launchers: a torch stub of a few lines shows what each Python runs instead of torch's launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.launching import ran

LOOK = """\
import sys, torch, torch.distributed.run as run
from torch.distributed.launcher import elastic_launch
from torch.distributed.launcher.api import launch_agent, other
import torch.distributed.launch as launch
print(run.main.__module__, elastic_launch.__module__, launch_agent.__module__, launch.launch.__module__)
print(other, run._private(), torch.distributed.run is run, [each for each in sys.path if each.endswith("site")])
"""
OURS = "aelastic.compat.launcher.run aelastic.compat.launcher.elastic_launch aelastic.compat.launcher.elastic_launch aelastic.launch"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A torch stub with a launcher, and a user's `sitecustomize`."""
    files = {
        "torch/__init__.py": "class _C:\n    _get_privateuse1_backend_name = staticmethod(lambda: 'none')\n",
        "torch/distributed/__init__.py": "",
        "torch/distributed/run.py": "def main(): print('torch runs')\ndef _private(): return 'private'\n"
        "if __name__ == '__main__': main()\n",
        "torch/distributed/launch.py": "",
        "torch/distributed/launcher/__init__.py": "from torch.distributed.launcher.api import elastic_launch\n",
        "torch/distributed/launcher/api.py": "elastic_launch = launch_agent = LaunchConfig = 1\nother = 'other'\n",
        "sitecustomize.py": "import os\nif 'SAY' in os.environ: print('the user is here', flush=True)\n",
        "torchrun": f"#!{sys.executable}\nfrom torch.distributed.run import main\nmain()\n",
        "train.py": "import os, sys\ntold = 'rank', os.environ['RANK'], sys.argv[1:], 'torch' in sys.modules\n"
        "os.write(1, ' '.join(map(str, told)).encode() + b'\\n')\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "torchrun").chmod(0o755)
    return tmp_path


def under(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(folder), **env}
    return ran(sys.executable, "-m", "aelastic.under", *argv, cwd=folder, env=given)


def test_a_program_that_imports_torchs_launcher_has_aelastics_and_what_ours_lacks_is_torchs(folder: Path) -> None:
    (folder / "look.py").write_text(LOOK)
    done = under(folder, "look.py", SAY="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["the user is here"] * 2 + [OURS, "other private True []"]


RUNS_IT = "import runpy; runpy.run_module('torch.distributed.run', run_name='__main__')"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["./torchrun"], id="torchrun"),
        pytest.param(["python", "-m", "torch.distributed.run"], id="python -m", marks=pytest.mark.all),
        pytest.param(["-m", "torch.distributed.run"], id="-m"),
        pytest.param(["-c", RUNS_IT], id="a program that runs it", marks=pytest.mark.all),
    ],
)
def test_a_program_that_is_torchs_launcher_is_aelastic_without_torch(folder: Path, how: list[str]) -> None:
    done = under(folder, *how, "--nproc-per-node", "2", "train.py", "a")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["rank 0 ['a'] False", "rank 1 ['a'] False"]


def test_a_process_may_replace_the_launcher_itself_after_it_has_been_imported(folder: Path) -> None:
    (folder / "look.py").write_text(
        f"import torch.distributed.run, torch.distributed.launcher, aelastic.under\naelastic.under.replace_launcher()\n{LOOK}"
    )
    done = ran(sys.executable, "look.py", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [OURS, "other private True []"]


def test_restarts_are_reported_although_the_program_shows_no_messages_of_aelastic(folder: Path) -> None:
    (folder / "fails.py").write_text(
        "raise SystemExit(int(__import__('os').environ['TORCHELASTIC_RESTART_COUNT']) == 0)\n"
    )
    (folder / "tool.py").write_text("from torch.distributed.run import main\nmain(['--max-restarts=1', 'fails.py'])\n")
    done = under(folder, "tool.py")
    assert done.returncode == 0
    assert "aelastic: W rank 0 failed on" in done.stderr and "restart 1 of 1" in done.stderr


def test_a_python_without_aelastic_runs_as_if_nothing_were_there(folder: Path) -> None:
    done = under(folder, "python", "-S", "-c", "import sys; print('sitecustomize' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n")
    code = "import torch.distributed.run as run; run.main()"
    site = "from aelastic.under.site import sitecustomize; print(sitecustomize.__file__)"
    where = ran(sys.executable, "-c", site, check=True).stdout.strip()
    code = f"import sys; sys.path[:0] = [{os.path.dirname(where)!r}, {str(folder)!r}]; import sitecustomize; {code}"
    command = [sys.executable, "-I", "-S", "-c", code]
    done = ran(*command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "torch runs\n", "")


def test_a_program_that_starts_no_launcher_is_reported_at_its_end(folder: Path) -> None:
    (folder / "alone.py").write_text(
        "import os, subprocess, sys\nif not os.fork(): sys.exit()\nos.wait()\n"
        "subprocess.run([sys.executable, 'train.py'], env={**os.environ, 'RANK': '-'})\nsys.exit(7)\n"
    )
    done = under(folder, "alone.py")
    assert (done.returncode, done.stdout) == (7, "rank - [] False\n")
    assert done.stderr == (
        "aelastic.under: alone.py started no torch launcher on this host, so aelastic did nothing: "
        "no restarts, no watching; see docs/how-to/from-torchrun.md\n"
    )


def test_a_launcher_that_a_program_starts_as_a_process_is_noticed(folder: Path) -> None:
    (folder / "tool.py").write_text("import subprocess\nsubprocess.run(['./torchrun', 'train.py'])\n")
    done = under(folder, "tool.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 [] False\n", "")


@pytest.mark.parametrize(
    "argv, code, words",
    [([], 2, "usage: python -m aelastic.under"), (["-h"], 0, ""), (["no-such"], 2, "program no-such not found in ")],
)
def test_what_cannot_be_run_is_reported_in_a_line(folder: Path, argv: list[str], code: int, words: str) -> None:
    done = under(folder, *argv)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


def test_deepspeeds_launcher_of_one_node_is_aelastic(folder: Path) -> None:
    info = "eyJsb2NhbGhvc3QiOiBbMCwgMV19"  # its runner's value for two devices on this host
    options = ["--master_addr=127.0.0.1", "--master_port=0", "--enable_each_rank_log=None", "--log_level=info"]
    done = under(folder, "-m", "deepspeed.launcher.launch", f"--world_info={info}", *options, "train.py", "--x", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"rank {n} ['--local_rank={n}', '--x', '1'] False" for n in (0, 1)]


def test_a_program_may_start_more_launchers_than_its_socket_holds_messages(folder: Path) -> None:
    held = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    (folder / "sweep.py").write_text(
        f"import os, aelastic.compat.launcher.run\nfor _ in range({held + 2}):\n    if not os.fork():\n"
        "        import torch.distributed.run\n        os._exit(0)\n    os.wait()\n"
    )
    done = under(folder, "sweep.py")
    assert (done.returncode, done.stderr) == (0, "")
