"""DeepSpeed by itself: the configuration is in its own JSON, and records go to its own monitor."""

from __future__ import annotations

import csv
import os
import pathlib
import tempfile
import warnings
from typing import Any

import torch
from _torchrun import is_rank
from torch import nn

import disthooks as dh

HOOKS = {
    "save": [{"modules": "layers.*", "store": {"kind": "OnDisk", "directory": tempfile.gettempdir()}}],
    "watch": {"every": 1, "stats": [{"kind": "Norm"}], "sinks": [{"kind": "DeepSpeedMonitor"}]},
}


def main(folder: str) -> None:
    warnings.filterwarnings("ignore")
    import deepspeed
    import torch.distributed as dist

    deepspeed.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on CPUs it would be compiled first, for a minute
    dist.init_process_group("gloo")
    config: dict[str, Any] = {  # or the path of a JSON file with the same
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "example"},
        "disthooks": HOOKS,
    }
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    with dh.prepare(engine) as attached:
        for step in range(4):
            x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            engine.backward(nn.functional.mse_loss(engine(x), x.roll(1, 1)))
            engine.step()
        engine.save_checkpoint(f"{folder}/saved", client_state={"disthooks": attached.state_dict()})
    theirs = float(engine.get_global_grad_norm())
    assert attached.report().moved > 0
    assert attached.gradients is not None
    assert abs(attached.gradients.latest["grad_norm"] / theirs - 1) < 1e-4

    if dist.get_rank() == 0:
        with next(pathlib.Path(folder).rglob("*disthooks_grad_norm.csv")).open() as file:
            rows = list(csv.reader(file))
        assert len(rows) == 1 + 4  # a title, and the records of all steps
        print(f"moved {attached.report().moved} bytes; gradient norm {float(rows[-1][1]):.4f}, DeepSpeed: {theirs:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if is_rank(__file__):
    main(os.environ["FOLDER"])
