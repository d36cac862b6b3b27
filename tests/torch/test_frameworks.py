"""Training frameworks under aelastic, and launchers with aelastic underneath.

The frameworks see a torchelastic launch, and neither start workers nor choose ports themselves.  The interpreter
with the frameworks is `kit.servers.frameworks`.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher, ran
from kit.servers.frameworks import INSTALL_TIMEOUT_S
from kit.waiting import wait_for
from kit.workers.torch_workers import ENDING, ours

# A worker of `under` writes, in one call, its rank, and whether it is aelastic's, whose workers have this socket.
PRINT = """\
import os


def tell(*words):
    told = "told", os.environ["RANK"], os.environ["WORLD_SIZE"], "TORCH_WORKER_SERVER_SOCKET" in os.environ, *words
    os.write(1, " ".join(map(str, told)).encode() + b"\\n")


"""

pytestmark = [pytest.mark.all, pytest.mark.timeout(INSTALL_TIMEOUT_S + 3 * LAUNCH_TIMEOUT_S)]


def test_accelerate_trains_saves_and_resumes_after_a_crash(launch: Launcher, python: str) -> None:
    lines = ours(
        launch,
        """
        from accelerate import Accelerator
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(1)
        accelerator = Accelerator(cpu=True)
        state = accelerator.state
        tell("state", state.distributed_type.value, state.process_index, state.local_process_index, state.num_processes)
        model = torch.nn.Linear(2, 1)
        data = DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), batch_size=2)
        model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        if restart == 1:
            accelerator.load_state("saved")
        for step, (batch,) in enumerate(data):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            tell("step", step, len(batch), f"{accelerator.gather(loss.detach()).mean():.6f}")
        accelerator.wait_for_everyone()
        if restart == 0:
            accelerator.save_state("saved")
            accelerator.wait_for_everyone()
            if rank == 1:
                os._exit(3)
            time.sleep(600)
        accelerator.end_training()
        """,
        "--max-restarts=1",
        python=python,
    )
    assert {"0 0 state MULTI_CPU 0 0 2", "1 1 state MULTI_CPU 1 1 2"} <= set(lines)
    assert len([line for line in lines if " step " in line]) == 2 * 2 * 2
    first, again = ({line.split()[-1] for line in lines if line.startswith(f"{n} 0 step 0")} for n in (0, 1))
    assert float(again.pop()) < float(first.pop())


# In an agent: on a busy machine, importing transformers may take longer than the half minute after which an agent uses
# what it has learned so far.  Restarts would then be warm, but without the trainer.
PATIENT = f"""
from aelastic.workers.forkserver import learning
learning.LEARN_TIMEOUT_S = {LAUNCH_TIMEOUT_S}
"""


def test_a_trainer_of_transformers_restarts_warm_with_what_the_first_workers_imported(
    launch: Launcher, python: str
) -> None:
    launch.python = python
    script = """
        say("had", restart, rank, "transformers.trainer" in sys.modules)
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


        class Tokens(torch.utils.data.Dataset):
            def __len__(self):
                return 16

            def __getitem__(self, number):
                tokens = (torch.arange(8) + number) % 32
                return {"input_ids": tokens, "labels": tokens}


        class Crash(TrainerCallback):
            def on_step_end(self, arguments, state, control, **_):
                say("step", restart, rank, state.global_step)
                if restart < 2 and state.global_step == 2:
                    wait_for(f"go{restart}")
                    os._exit(3)


        torch.manual_seed(1)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        arguments = TrainingArguments(
            output_dir="out", max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no"
        )
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        Trainer(model, arguments, train_dataset=Tokens(), callbacks=[Crash()]).train()
        say("trained", rank)
        """
    job = launch(
        textwrap.dedent(script) + ENDING,
        "--nproc-per-node=2",
        "--max-restarts=2",
        "--preload=auto",
        "--log-dir=logs",
        wrapper=PATIENT,
    )
    for restart in range(2):
        # The first workers' imports are in a parked process: more memory than a bare interpreter takes.
        steps = partial(had_step, job, f"step {restart} 0 2")
        wait_for("the second step is done", steps, LAUNCH_TIMEOUT_S)
        wait_for("a warm generation is parked", lambda: is_parked(job), LAUNCH_TIMEOUT_S)
        (job.folder / f"go{restart}").touch()
    assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
    had = sorted(line.removeprefix("had ") for line in job.lines if line.startswith("had "))
    assert had == [f"{restart} {rank} {restart > 0}" for restart in range(3) for rank in range(2)]
    assert sum(line.startswith("trained") for line in job.lines) == 2
    assert " W --preload" not in job.stderr, job.stderr
    assert not job.left(), job.left_described()  # torch leaves a folder


def had_step(job: Job, line: str) -> bool:
    return line in job.lines


def is_parked(job: Job) -> bool:
    (path,) = job.folder.glob("logs/latest/events.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    measured = [record for record in records if record["event"] == "fork_server_measured"]
    return bool(measured) and measured[-1]["parked"] == 2 and measured[-1]["pss_bytes"] > 50 << 20


def test_lightning_sees_torchelastic_trains_and_resumes_after_a_crash(launch: Launcher, python: str) -> None:
    lines = ours(
        launch,
        """
        import lightning
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.plugins.environments import TorchElasticEnvironment
        from torch.utils.data import DataLoader, TensorDataset


        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)

            def training_step(self, batch, index):
                return self.layer(batch[0]).square().mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

            def on_train_epoch_start(self):
                weights = " ".join(f"{number:.6f}" for number in self.layer.weight.flatten().tolist())
                tell("epoch", self.current_epoch, self.global_step, weights)
                if self.current_epoch == 1 and restart == 0:
                    if rank == 0:
                        os._exit(3)
                    time.sleep(600)


        lightning.seed_everything(1)
        tell("detected", TorchElasticEnvironment.detect())
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=2,
            logger=False,
            enable_progress_bar=False,
            callbacks=[ModelCheckpoint(dirpath="saved", save_last=True)],
        )
        environment = trainer.strategy.cluster_environment
        tell("environment", type(environment).__name__, environment.creates_processes_externally)
        tell("ranks", trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size)
        data = DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), batch_size=2)
        trainer.fit(Model(), data, ckpt_path="last" if restart else None)
        tell("done", trainer.current_epoch, trainer.global_step)
        """,
        "--max-restarts=1",
        python=python,
    )
    environment = "environment TorchElasticEnvironment True"
    assert {"0 0 detected True", f"0 0 {environment}", f"1 1 {environment}", "0 1 ranks 1 1 0 2"} <= set(lines)
    resumed = {line.split(" ", 2)[2] for line in lines if line.split()[2:4] == ["epoch", "1"]}
    assert len(resumed) == 1  # the same weights on all ranks, before and after the crash
    assert {"1 0 done 2 4", "1 1 done 2 4"} <= set(lines)


# Under other launchers.


def under(python: str, folder: Path, *argv: str, **env: str) -> tuple[int, list[str], str]:
    """Exit code of a program with aelastic underneath, its workers' output, and its stderr."""
    given = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    done = ran(python, "-m", "aelastic.under", *argv, cwd=folder, timeout=2 * LAUNCH_TIMEOUT_S, env=given)
    lines = [line[line.index("told") :] for line in done.stdout.splitlines() if "told" in line]
    return done.returncode, sorted(lines), done.stderr


def test_accelerate_launch_runs_aelastic_and_its_restarts(python: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        PRINT + "from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "restart = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "tell(restart, accelerator.process_index, accelerator.num_processes)\n"
        "accelerator.wait_for_everyone()\n"
        "if restart == '0' and accelerator.process_index == 1:\n    raise LookupError('no batch left')\n"
    )
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    code, lines, stderr = under(python, tmp_path, "accelerate", "launch", *options, "--max_restarts=1", "train.py")
    assert code == 0, stderr
    assert lines == sorted(f"told {rank} 2 True {restart} {rank} 2" for rank in (0, 1) for restart in (0, 1))
    assert "aelastic: W rank 1 failed on" in stderr and "LookupError: no batch left" in stderr
    assert "restart 1 of 1" in stderr


NOTEBOOK = """\
def train(words):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    tell(words, accelerator.process_index, accelerator.num_processes)
    if words == "fail":
        raise LookupError("no batch left")
    accelerator.wait_for_everyone()  # gloo fails in a rank whose peer ends while it still connects


if __name__ == "__main__":
    if "--replace" in sys.argv:
        import torch, aelastic.under
        aelastic.under.replace_launcher()
    from accelerate import notebook_launcher

    notebook_launcher(train, (sys.argv[1],), num_processes=2, use_port="0")
"""


def test_accelerates_notebook_launcher_runs_aelastic(python: str, tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text(f"{PRINT}import sys\n\n\n{NOTEBOOK}")
    code, lines, stderr = under(python, tmp_path, "cell.py", "hello")
    assert (code, lines) == (0, [f"told {rank} 2 True hello {rank} 2" for rank in (0, 1)]), stderr
    code, lines, stderr = under(python, tmp_path, "cell.py", "fail")
    # The second rank may be stopped before it reports.
    assert code == 1 and lines and "ChildFailedError" in stderr and "LookupError: no batch left" in stderr
    done = ran(python, "cell.py", "hello", "--replace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "told 0 2 True hello 0 2" in done.stdout and "told 1 2 True hello 1 2" in done.stdout


def test_torchx_on_this_machine_runs_aelastic(python: str, tmp_path: Path) -> None:
    # To a file: torchx shows only part of the output if a job ends soon.
    (tmp_path / "train.py").write_text(
        f"{PRINT}os.dup2(os.open('told', os.O_CREAT | os.O_APPEND | os.O_WRONLY), 1)\ntell(os.environ['ROLE_NAME'] == '')\n"
    )
    job = ["torchx", "run", "--wait", "-s", "local_cwd", "dist.ddp", "-j", "1x2", "--script", "train.py"]
    # It starts `torchrun` from PATH, which torch has installed next to this Python.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    code, _, stderr = under(python, tmp_path, *job, PATH=path, HOME=str(tmp_path))
    assert code == 0, stderr
    assert sorted((tmp_path / "told").read_text().splitlines()) == ["told 0 2 True True", "told 1 2 True True"]
