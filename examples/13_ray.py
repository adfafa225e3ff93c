"""Ray Train: the process group is there when the loop begins; the configuration travels in train_loop_config."""

from __future__ import annotations

import os
import pathlib
import tempfile
import warnings
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0"}
os.environ |= {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}  # to be quick
warnings.filterwarnings("ignore")

import ray  # noqa: E402
import torch  # noqa: E402
from ray.train import RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402

FOLDER = tempfile.mkdtemp()
HOOKS = {
    "save": [{"modules": "layers.*", "store": {"kind": "OnDisk", "directory": FOLDER}}],
    "watch": {"every": 1, "rules": [{"kind": "ClipZScore", "warmup_steps": 2}]},
}


def train(config: dict[str, Any]) -> None:
    """Runs in each worker."""
    import ray.train.torch
    from torch import nn

    import disthooks as dh

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
    model = ray.train.torch.prepare_model(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))  # DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attached = dh.prepare(model, optimizer, config["disthooks"])  # a dict, or a path that every worker can read
    rank, theirs = ray.train.get_context().get_world_rank(), 0.0
    for step in range(4):
        x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.roll(1, 1)).backward()
        theirs = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    watch = attached.gradients
    assert watch is not None
    watch.flush()  # a record is one step late
    metrics = {"grad_norm": watch.latest["grad_norm"], "torch_norm": theirs, "moved": attached.report().moved}
    with tempfile.TemporaryDirectory() as folder:
        kept = {"model": model.module.state_dict(), "disthooks": attached.state_dict()}
        torch.save(kept, pathlib.Path(folder, "state.pt"))
        # Every worker reports; Ray gives back the metrics of the first one, and only those that come with a checkpoint.
        checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report(metrics, checkpoint=checkpoint)
    attached.remove()


if __name__ == "__main__":
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False, logging_level="ERROR"
    )
    try:
        trainer = TorchTrainer(
            train,
            train_loop_config={"disthooks": HOOKS},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=FOLDER, name="ray"),
        )
        result = trainer.fit()
    finally:
        ray.shutdown()
    found: Any = result.metrics
    assert found["moved"] > 0
    assert abs(found["grad_norm"] / found["torch_norm"] - 1) < 1e-4
    with result.checkpoint.as_directory() as path:
        assert torch.load(pathlib.Path(path, "state.pt"))["disthooks"]["steps"] == 4
    print(f"moved {found['moved']} bytes a worker; gradient norm {found['grad_norm']:.4f}")
