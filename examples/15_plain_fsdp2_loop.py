"""A loop of one's own, as torchtitan's: checkpoints, fully_shard by block, accumulation, own clipping, DCP."""

from __future__ import annotations

import os
import tempfile

import torch
from _torchrun import is_rank
from torch import nn

import disthooks as dh

HOOKS = {
    "save": [{"modules": "layers.*", "store": {"kind": "OnDisk", "directory": tempfile.gettempdir()}}],
    "watch": {"every": 1, "stats": [{"kind": "Norm"}]},
}


def main(folder: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        for name, block in list(model.layers.named_children()):
            block = checkpoint_wrapper(block) if name == "0" else block  # add torch.compile(block) here
            model.layers.register_module(name, block)
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attached = dh.prepare(model, optimizer, HOOKS)  # after fully_shard, after the optimizer
    watch = attached.gradients
    assert watch is not None
    norm = torch.tensor(0.0)
    for step in range(4):
        optimizer.zero_grad()
        for micro in (0, 1):
            model.set_requires_gradient_sync(micro == 1)
            x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            (nn.functional.mse_loss(model(x), x.roll(1, 1)) / 2).backward()
        watch.begin_step()  # now, before the loop clips; without this line at optimizer.step()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
        optimizer.step()
    watch.flush()
    assert attached.report().moved > 0
    assert abs(watch.latest["grad_norm"] / float(norm) - 1) < 1e-4

    # Checkpoints have no trace of what is attached; a run without disthooks goes on from them.
    saved = get_model_state_dict(model)
    assert list(saved) == list(get_model_state_dict(build()))
    dcp.save(saved, checkpoint_id=folder)
    if rank == 0:
        print(
            f"moved {attached.report().moved} bytes; gradient norm {watch.latest['grad_norm']:.4f}, torch's {norm:.4f}"
        )
    attached.remove()
    dist.barrier()
    dist.destroy_process_group()


if is_rank(__file__):
    main(os.environ["FOLDER"])
