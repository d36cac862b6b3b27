"""Trains with transformers' `Trainer`; if a rank is lost, the others keep their processes and their state.

    pip install transformers accelerate
    python -m aelastic --nproc-per-node 4 --max-restarts 3 --preload auto transformers_trainer.py

To see it recover, run `kill -9` with one of the process ids that it prints.  Nothing is downloaded: the model is made
here, and so are its texts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from aelastic import in_place
from aelastic.training import Round
from aelastic.training.frameworks.transformers import train_in_place


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Stands in for your data set: sequences of 16 tokens that count up, from any token on."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + number) % 64
        return {"input_ids": tokens, "labels": tokens}


class PrintLoss(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {float(logs['loss']):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    options = parser.parse_args()

    logging.disable_progress_bar()
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )
    train(model, options)


@in_place
def train(round: Round, model: Any, options: argparse.Namespace) -> None:
    """Called in each round of the job.  Arguments and trainer belong to the round; the model does not."""
    # In one piece, since all ranks print.
    print(f"rank {os.environ['RANK']} is process {os.getpid()}\n", end="", flush=True)
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        save_strategy="no",
        logging_steps=options.log_every,
        use_cpu=not torch.cuda.is_available(),  # without it, each rank on CPUs trains on its own
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=Texts(), callbacks=[PrintLoss()])
    trainer.remove_callback(PrinterCallback)  # `PrintLoss` prints instead
    train_in_place(round, trainer)  # instead of `trainer.train()`


if __name__ == "__main__":
    main()
