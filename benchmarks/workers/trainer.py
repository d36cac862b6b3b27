"""A worker that says when Hugging Face's Trainer has done its first step: `trainer.py FIFO FAILURES SECONDS`.

The model is tiny and random, so what a start takes is imports and what the Trainer prepares.  Rank 1 fails so often, so
many seconds after that step.
"""

import os
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

fifo = os.open(sys.argv[1], os.O_WRONLY)
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def stamp(kind: str) -> None:
    os.write(fifo, f"{kind} {rank} {restart} {os.getpid()} {time.monotonic()!r}\n".encode())


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) + number) % 32
        return {"input_ids": tokens, "labels": tokens}


class FirstStep(TrainerCallback):  # type: ignore[misc]  # transformers need not be installed
    def on_step_end(self, *_: Any, **__: Any) -> None:
        stamp("stepped")
        if restart < int(sys.argv[2]):
            time.sleep(float(sys.argv[3]))
            if rank == 1:
                stamp("crashed")
                os._exit(1)
            time.sleep(60)


config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, use_cache=False
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens(), callbacks=[FirstStep()]).train()
