"""Trains a small language model with transformers' `Trainer`, and resumes from its last checkpoint after a restart.

    pip install transformers accelerate
    python -m aelastic --nproc-per-node 2 --max-restarts 3 transformers_trainer.py

To see it resume, run `kill -9` with one of the process ids that it prints.  Nothing is downloaded: the model is made
here, and so are its texts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Stands in for your data set: sequences of 16 tokens that count up, from any token on."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + number) % 64
        return {"input_ids": tokens, "labels": tokens}


class Progress(TrainerCallback):
    """Prints where the training starts, and its loss."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            done = state.global_step
            print(f"resuming after step {done}" if done else "starting from scratch", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {float(logs['loss']):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()
    print(
        f"rank {os.environ['RANK']} is process {os.getpid()}\n", end="", flush=True
    )  # in one piece, since all ranks print

    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )
    arguments = TrainingArguments(
        output_dir=str(options.checkpoints),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=options.save_every,
        use_cpu=not torch.cuda.is_available(),  # without it, each rank on CPUs trains on its own
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to=[],
    )
    logging.disable_progress_bar()
    trainer = Trainer(model, arguments, train_dataset=Texts(), callbacks=[Progress()])
    trainer.remove_callback(PrinterCallback)  # `Progress` prints instead
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.checkpoints))


def newest_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint; None without one.

    `transformers.trainer_utils.get_last_checkpoint` also returns one that was interrupted.  The file
    `trainer_state.json` is written last, so a folder that has it is complete.
    """
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    newest = max(complete, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)
    return str(newest) if newest else None


if __name__ == "__main__":
    main()
