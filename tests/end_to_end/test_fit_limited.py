"""Trainings that die under a limit of their memory, and finish under it with ``fit``, with the same losses."""

from __future__ import annotations

import json
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
import json, pathlib, re, resource, sys, threading, time
import torch
from torch.nn.functional import log_softmax, logsigmoid
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import disthooks as dh

program, folder, limit, budget = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
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


def data():
    return int(re.search(r"VmData:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10


def watch_data():
    while True:
        most[0] = max(most[0], data())
        time.sleep(0.002)


dh.memory.release_promptly()
start, most = data(), [0]
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (start + limit, resource.RLIM_INFINITY))
else:
    threading.Thread(target=watch_data, daemon=True).start()
losses = {"trainer": trainer, "preferences": preferences}[program](budget and dh.memory.resident() + budget)
print(json.dumps({"losses": losses, "needs": most[0] - start}))
"""


def _run(program: str, folder: pathlib.Path, limit: int = 0, budget: int = 0) -> subprocess.CompletedProcess[str]:
    """Train in a process that may allocate ``limit`` bytes more than it has before the first step; 0 for any number."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    command = [sys.executable, str(script), program, str(folder), str(limit), str(budget)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.full_tier(program=("trainer",))
@pytest.mark.parametrize("program", ["trainer", "preferences"])
def test_a_training_that_dies_under_a_limit_finishes_with_fit(program: str, tmp_path: pathlib.Path) -> None:
    free = _run(program, tmp_path)
    assert free.returncode == 0, free.stderr
    found = json.loads(free.stdout.splitlines()[-1])
    limit, budget = (int(share * found["needs"]) for share in (0.75, 0.55))
    died = _run(program, tmp_path, limit)
    assert died.returncode != 0
    assert "can't allocate memory" in died.stderr
    fitted = _run(program, tmp_path, limit, budget)
    assert fitted.returncode == 0, fitted.stderr
    assert json.loads(fitted.stdout.splitlines()[-1])["losses"] == found["losses"]
