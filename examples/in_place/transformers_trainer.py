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
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from aelastic import in_place
from aelastic.training import Late, Round, Value


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Stands in for your data set: sequences of 16 tokens that count up, from any token on."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + number) % 64
        return {"input_ids": tokens, "labels": tokens}


class InPlaceTrainer(Trainer):
    def _load_from_checkpoint(self, *_: Any) -> None:
        """The weights are there already: `share` has brought them."""


class Commits(TrainerCallback):
    """Tells the round about each step, and prints the loss."""

    def __init__(self, round: Round, optimizer: Late, scheduler: Late, progress: Value) -> None:
        self.round, self.optimizer, self.scheduler, self.progress = round, optimizer, scheduler, progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        self.round.attach(self.optimizer, made["optimizer"].optimizer)
        self.round.attach(self.scheduler, made["lr_scheduler"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(state.global_step * args.world_size + args.process_index)  # dropout

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The scheduler has moved, and the collectives of logging, evaluation and saving come later.
        self.progress.value = vars(state).copy()
        self.round.commit(state.global_step)

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
    # The trainer makes its optimizer and its scheduler in each round; the last is its `TrainerState`.
    train(model, Late(), Late(), Value(), options)


@in_place
def train(
    round: Round, model: Any, optimizer: Late, scheduler: Late, progress: Value, options: argparse.Namespace
) -> None:
    """Called in each round of the job.  Arguments and trainer belong to the round."""
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
        data_seed=1,
    )
    rank = arguments.process_index  # and this makes the process group
    start = round.share(model, optimizer, scheduler, progress)
    # In one piece, since all ranks print.
    print(f"rank {rank} is process {os.getpid()} and begins at step {start}\n", end="", flush=True)
    if start == options.steps:
        return  # a rank was lost after the last step
    trainer = InPlaceTrainer(
        model, arguments, train_dataset=Texts(), callbacks=[Commits(round, optimizer, scheduler, progress)]
    )
    trainer.remove_callback(PrinterCallback)  # `Commits` prints instead
    with tempfile.TemporaryDirectory() as folder:
        if start:  # the trainer takes the step to resume at from a file only, and skips the batches before it
            state = TrainerState()
            vars(state).update(progress.value)
            state.save_to_json(f"{folder}/trainer_state.json")
        trainer.train(resume_from_checkpoint=folder if start else None)


if __name__ == "__main__":
    main()
