"""Which module a report blames, from the log of a real training with a fault in it."""

from __future__ import annotations

import pathlib

import torch
from torch import nn

import disthooks as dh
from disthooks.report.culprit import culprits
from disthooks.report.log import read


def test_a_backward_that_went_wrong_in_a_step_in_which_all_gradients_are_large(tmp_path: pathlib.Path) -> None:
    """The loss of step 30 counts eight times, so gradients behind the module are larger than usual too."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the fault shall not go into the weights
    now = [0]

    def spoil(grad: torch.Tensor) -> torch.Tensor | None:
        if now[0] != 30:
            return None
        spoiled = grad.clone()
        spoiled.view(-1)[5] = 1e30
        return spoiled

    model[2][0].register_forward_pre_hook(lambda module, args: args[0].register_hook(spoil) and None)
    file = tmp_path / "run.jsonl"
    watch = {"every": 1, "stats": "full", "sinks": [{"kind": "Jsonl", "path": str(file)}]}
    with dh.prepare(model, optimizer, {"watch": watch}):
        for step in range(40):
            now[0] = step
            loss = (model(torch.randn(8, 16)) ** 2).mean()
            optimizer.zero_grad()
            ((8 if step == 30 else 1) * loss).backward()
            optimizer.step()
    (run,) = read(file).runs
    found = [(culprit.kind, culprit.step, culprit.where) for culprit in culprits(run)]
    assert found == [("backward", 30, "2.0")]
