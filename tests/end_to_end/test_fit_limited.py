"""Trainings that die under a limit of their memory, and finish under it with ``fit``, with the same losses."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from disthooks import memory
from tests.support import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")

SCRIPT = """
import importlib, logging, pathlib, sys
import torch
from torch.nn.functional import log_softmax, logsigmoid
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import disthooks as dh

at_most = importlib.import_module("20_keep_a_budget").at_most
program, folder = sys.argv[1:]
text = torch.frombuffer(bytearray(pathlib.Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()


def gpt():
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 256, "n_embd": 256, "n_layer": 6, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, use_cache=False))


def pages(i, count=8, length=256):
    begins = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(i))
    return torch.stack([text[begin : begin + length] for begin in begins.tolist()])


def fitted(model, budget):
    if budget:
        dh.fit(model, budget, dh.OnDisk(folder, in_flight="16 MiB"))
    return model


def trainer(budget):
    # The HF Trainer accumulates the gradients of two batches.
    examples = [{"input_ids": page, "labels": page} for i in range(4) for page in pages(i)]
    arguments = TrainingArguments(
        output_dir=folder, max_steps=2, per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
    )
    running = Trainer(fitted(gpt(), budget), arguments, train_dataset=examples)
    running.train()
    return [row["loss"] for row in running.state.log_history if "loss" in row]


def preferences(budget):
    # A better and a worse answer beside those of a frozen reference, as in DPO.
    model, reference = fitted(gpt(), budget), gpt().requires_grad_(False)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-4), []

    def likelihood(of, tokens):
        logits = log_softmax(of(input_ids=tokens).logits[:, :-1], -1)
        return logits.gather(-1, tokens[:, 1:, None]).sum()

    for i in range(3):
        better, worse = pages(2 * i, 4, 256), pages(2 * i + 1, 4, 192)
        with torch.no_grad():
            known = likelihood(reference, better) - likelihood(reference, worse)
        loss = -logsigmoid(1e-2 * (likelihood(model, better) - likelihood(model, worse) - known))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


dh.memory.release_promptly()
train = {"trainer": trainer, "preferences": preferences}[program]
free = train(None)
dh.memory.reset_peak_resident()
before = dh.memory.resident()
assert train(None) == free
room = (dh.memory.peak_resident() - before) * 7 // 10
with at_most(room):
    try:
        train(None)
        died = "no"
    except RuntimeError as error:
        died = str(error)
    losses = train(dh.memory.resident() + room * 9 // 10)
assert "can't allocate memory" in died, died
assert losses == free, (losses, free)
print("died without, the same losses with fit:", losses[-1])
"""


@pytest.mark.full_tier(program=("trainer",))
@pytest.mark.parametrize("program", ["trainer", "preferences"])
def test_a_training_that_dies_under_a_limit_finishes_with_fit(program: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    command = [sys.executable, str(script), program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "the same losses with fit" in done.stdout
