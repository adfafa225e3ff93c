"""Ray Train's TorchTrainer, on two real workers. The norm and the checkpoint are proven by examples/13_ray.py."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from typing import Any

import pytest
import torch

from tests.support import ROOT

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif("DISTHOOKS_FULL" not in os.environ, reason="Ray takes half a minute to start: DISTHOOKS_FULL=1"),
]


def _worker(config: dict[str, Any]) -> None:
    """With and without what DISTHOOKS_CONFIG names; then one worker with a configuration that is wrong."""
    import ray.train.torch

    import disthooks as dh
    from disthooks.errors import UsageError
    from tests.support.models import Tiny, tokens

    rank = ray.train.get_context().get_world_rank()

    def trained(attach: bool) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = ray.train.torch.prepare_model(Tiny().eval())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        attached = dh.prepare(model, optimizer) if attach else None
        for step in range(3):
            optimizer.zero_grad()
            model(tokens(seed=10 * step + rank)).square().mean().backward()
            optimizer.step()
        if attached is not None:
            attached.remove()
        return attached, [p.detach().clone() for p in model.parameters()]

    plain, (attached, weights) = trained(False)[1], trained(True)
    model, told = ray.train.torch.prepare_model(Tiny()), ""
    try:
        dh.prepare(model, config={"save": [{"modules": "blocks.*" if rank else "block", "store": {"kind": "OnCpu"}}]})
    except UsageError as error:
        told = str(error)
    same = all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    found = {"same": same, "moved": attached.report().moved, "told": told, "steps": attached.gradients.steps}
    with tempfile.TemporaryDirectory() as folder:  # result.metrics has what comes with a checkpoint
        pathlib.Path(config["folder"], f"{rank}.json").write_text(json.dumps(found))
        checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({}, checkpoint=checkpoint)


def test_torch_trainer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or a token is written into the home directory
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    store = {"kind": "OnDisk", "directory": str(tmp_path)}
    hooks = {
        "save": [{"modules": "blocks.*", "at_least": "1 KiB", "store": store}],
        "watch": {"every": 1, "stats": [{"kind": "Norm"}]},
    }
    (tmp_path / "hooks.yaml").write_text(json.dumps(hooks))
    variables = {"DISTHOOKS_CONFIG": str(tmp_path / "hooks.yaml"), "PYTHONPATH": str(ROOT)}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, runtime_env={"env_vars": variables})
    try:
        TorchTrainer(
            _worker,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=str(tmp_path), name="run"),
        ).fit()
    finally:
        ray.shutdown()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [(each["same"], each["moved"] > 0, each["steps"]) for each in found] == [(True, True, 3)] * 2
    assert "matches no module" in found[0]["told"]
    assert "another of the ranks [0, 1] failed" in found[1]["told"]
