"""One configuration on several ranks: DeepSpeed's own JSON, local shards under a budget, ranks that must agree."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.config import Prepared
from disthooks.config.plan import weights_of
from disthooks.errors import AttachError, ConfigError
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist
HOOKS: dict[str, Any] = {
    "save": [{"modules": "0", "at_least": 0, "store": {"kind": "OnDisk", "directory": "/tmp"}}],
    "watch": {"every": 1, "stats": ["standard"], "rules": [{"kind": "ClipNorm", "max_norm": 1e-3}]},
}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def _engine(folder: str, stage: int, hooks: Any, as_file: str = "") -> Any:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
        "disthooks": hooks,
    }
    if as_file:
        pathlib.Path(as_file).write_text(json.dumps(config))
    return deepspeed.initialize(model=_net(), config=as_file or config, dist_init_required=False)[0]


def _numbers(engine: Any, rank: int, attached: Prepared) -> tuple[dict[str, Any], int]:
    with attached:
        for step in range(2):
            engine.backward(engine(torch.full((8, 64), float(step + rank))).square().mean())
            engine.step()
    assert attached.gradients is not None
    numbers = {name: value for name, value in attached.gradients.latest.items() if name.startswith(("grad_", "clip_"))}
    return numbers, attached.report().moved


def _deepspeed(rank: int, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    os.environ.pop("DISTHOOKS_CONFIG", None)
    sinks = {"watch": HOOKS["watch"] | {"sinks": [{"kind": "DeepSpeedMonitor", "prefix": "seen/"}]}}
    engine = _engine(folder, 2, HOOKS | sinks, f"{folder}/ds{rank}.json")
    found = {"prepare": _numbers(engine, rank, dh.prepare(engine))}
    engine = _engine(folder, 2, {})
    found["plan"] = _numbers(engine, rank, dh.config.from_config(HOOKS).prepare(engine))
    third = _engine(folder, 3, "nowhere.yaml")
    found["shards"] = weights_of(third)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: .* \(the 'disthooks' of DeepSpeed's conf"):
        dh.prepare(third)
    return found


def test_deepspeeds_own_configuration(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    first, second = ranks(_deepspeed, str(tmp_path), timeout=300)
    assert first["prepare"][0] == first["plan"][0] == second["prepare"][0]  # the same, whoever attached it
    assert first["prepare"][0]["grad_norm_clipped"] < 1.01e-3 < first["prepare"][0]["grad_norm"]
    assert first["prepare"][1] > 0
    assert first["shards"] + second["shards"] == sum(4 * parameter.numel() for parameter in _net().parameters())
    with (tmp_path / "run/seen_grad_norm.csv").open() as file:
        assert [row[0] for row in csv.reader(file)] == ["step", "16", "32"]


def _shards(rank: int, folder: str) -> tuple[int, int, list[str]]:
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mine = weights_of(net)
    plan: dict[str, Any] = HOOKS | {"budget": mine - 1}
    errors = []
    with pytest.raises(ConfigError, match=f"budget: .*{mine - 1} bytes.* are less than .*{mine} bytes") as raised:
        dh.prepare(net, optimizer, plan)
    errors.append(type(raised.value).__name__)
    if rank:  # a plan that another rank has not
        plan = HOOKS | {"exact": True}
    with pytest.raises((AttachError, ConfigError)) as other:
        dh.prepare(net, optimizer, plan)
    errors.append(f"{type(other.value).__name__}: {other.value}")
    assert type(net[0]) is nn.Linear
    with pytest.raises(AttachError, match=r"have different configurations: .*this one says .*'exact': ") as last:
        dh.prepare(net, optimizer, HOOKS | {"exact": bool(rank)})
    errors.append(type(last.value).__name__)
    with dh.prepare(net, optimizer, HOOKS | {"budget": mine + (64 << 10)}) as attached:
        net(torch.full((32, 64), 1.0 + rank)).sum().backward()
        optimizer.step()
    return mine, attached.report().moved, errors


def test_local_shards_and_agreement_under_fsdp2(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    first, second = ranks(_shards, str(tmp_path))
    whole = sum(4 * parameter.numel() for parameter in _net().parameters())
    assert first[0] + second[0] == whole
    assert first[2][0] == second[2][0] == "ConfigError"
    assert first[2][1].startswith("ConfigError")  # its budget
    assert second[2][1].startswith("AttachError: the configuration: another of the ranks [0, 1] failed")
    assert first[2][2] == second[2][2] == "AttachError"


def _drifts(rank: int) -> list[Any]:
    """The configuration alone finds the rank whose weights drift, and the module that makes a NaN there."""
    said, errors = io.StringIO(), []
    model = nn.parallel.DistributedDataParallel(_net())
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"blame": True, "check_replicas": 2, "watch": {"every": 1, "stats": [{"kind": "NonFinite"}]}}
    with contextlib.redirect_stderr(said), dh.prepare(model, optimizer, config) as attached:
        for number in range(8):
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                if number == 3 and rank == 1:
                    model.module[2].weight[0, 0] += 1
                if number == 6 and rank == 1:
                    model.module[2].bias[0] = torch.nan
            assert attached.watchers is not None
            report = attached.watchers.replicas
            errors.append(None if report is None else [(one.name, one.copies) for one in report.differs])
        assert attached.gradients is not None
    latest = attached.gradients.latest
    return [errors, said.getvalue(), latest.get("replicas/differ"), latest["blame"]]


def test_drift_and_blame_by_the_configuration_alone(ranks: Ranks) -> None:
    for rank, (errors, said, logged, blamed) in enumerate(ranks(_drifts)):
        assert errors[:5] == [[], [], [], [], []]
        assert ("2.weight", 2) in errors[5]
        assert len(blamed) == 1  # the first rank has the record of all ranks
        assert blamed[0].startswith("rank 1, forward 7: 2 (Linear), call 0")
        assert logged == 0  # at last all weights are NaN, on both ranks alike
        drifted = "WARNING: after 6 steps what should be the same on all ranks is not: DDP, 2 ranks"
        assert said.count(drifted) == (rank == 0)
        assert said.count("WARNING: step 7: gradients are not finite") == (rank == 0)
        assert said.count("rank 1, forward 7: 2 (Linear), call 0") == (rank == 1)
