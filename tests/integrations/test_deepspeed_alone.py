"""DeepSpeed by itself: the configuration in its own JSON, its monitor, its checkpoints, its norm."""

from __future__ import annotations

import csv
import pathlib
from typing import Any

import pytest
import torch

import disthooks as dh
from tests.support.models import Tiny, tokens
from tests.support.ranks.harness import Ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist
WATCH = {"every": 1, "rules": [{"kind": "ClipZScore", "warmup_steps": 2, "z_thresh": 0.1}]}


def _engine(stage: int, folder: str, hooks: dict[str, Any] | None) -> Any:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    if hooks is not None:
        monitor = {"enabled": True, "output_path": folder, "job_name": f"stage{stage}"}
        config |= {"disthooks": hooks, "csv_monitor": monitor}
    torch.manual_seed(0)
    return deepspeed.initialize(model=Tiny().eval(), config=config, dist_init_required=False)[0]


def _train(rank: int, engine: Any, steps: range) -> list[float]:
    norms = []
    for step in steps:
        for micro in (0, 1):
            engine.backward(engine(tokens(seed=100 * step + 10 * micro + rank)).square().mean())
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def _weights(engine: Any) -> list[torch.Tensor]:
    return [getattr(p, "ds_tensor", p).detach().clone() for p in engine.module.parameters()]


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_weights(one), _weights(other), strict=True))


def _rules(rank: int, folder: str) -> dict[str, Any]:
    """What rules learned goes with DeepSpeed's checkpoints, as its client state; records go to its monitor."""
    whole, first = _engine(2, folder, {"watch": WATCH}), _engine(2, folder, {"watch": WATCH})
    with dh.prepare(whole) as attached:
        _train(rank, whole, range(4))
        learned = str(attached.state_dict())
    with dh.prepare(first) as attached:
        _train(rank, first, range(2))
        first.save_checkpoint(f"{folder}/rules", client_state={"disthooks": attached.state_dict()})
    rest = _engine(2, folder, {"watch": WATCH})
    plan = dh.config.from_config(rest.config["disthooks"])
    with plan.prepare(rest, sinks=[dh.sinks.DeepSpeedMonitor(rest)]) as attached:
        attached.load_state_dict(rest.load_checkpoint(f"{folder}/rules")[1]["disthooks"])
        _train(rank, rest, range(2, 4))
    return {
        "state": str(attached.state_dict()) == learned,
        "same": _same(whole, rest),
        "clipped": attached.gradients.latest,
    }


def test_rules(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    found = ranks(_rules, str(tmp_path))
    assert [each["state"] and each["same"] for each in found] == [True, True]
    with next(tmp_path.rglob("*disthooks_grad_norm.csv")).open() as file:
        rows = list(csv.reader(file))
    assert float(rows[-1][1]) == pytest.approx(found[0]["clipped"]["grad_norm"], rel=1e-5)
