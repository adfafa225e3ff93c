"""Trains a small model with any engine, and knows nothing of disthooks; prints its losses as lines of JSON."""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS = 8  # of the global batch, however many ranks share it


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step, width=32):
    make = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 64, width, generator=make, dtype=torch.float64)
    y = torch.randint(0, 4, (ROWS, 64), generator=make)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    return x[mine], y[mine]


def global_loss(loss):
    loss = loss.detach().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def built(engine, model):
    """The wrapped model, its optimizer, and functions of a loss and of nothing: backward and step."""
    if engine == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return model, optimizer, accelerator.backward
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    if engine == "deepspeed":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
        config = {"train_batch_size": ROWS, "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size()}
        config |= {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return model, model, model.backward
    early = torch.optim.AdamW(model.parameters(), lr=1e-2) if engine in ("plain", "ddp") else None
    if engine == "ddp":
        model = DDP(model)
    elif engine == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = early or torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.Tensor.backward


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--clip", type=float, help="clip gradients by their norm, with torch's own function")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--local_rank", "--local-rank")
    for name in ("--run", "--config_file", "-m"):
        parser.add_argument(name)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    for engine in options.engine.split(","):
        train(engine, options)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(engine, options):
    torch.manual_seed(0)
    model = Model().double()
    model, optimizer, backward = built(engine, model)
    with torch.no_grad():
        model(batch(0)[0])  # a look at the model before it trains
    for step in range(options.steps):
        x, y = batch(step)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        backward(loss)
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        if not hasattr(model, "backward"):
            optimizer.zero_grad()
        told = global_loss(loss)
        if os.environ.get("RANK", "0") == "0":
            where = {"argv": sys.argv, "main": __name__, "file": __file__, "path": sys.path[0]}
            print(json.dumps({"step": step, "loss": told, **where}))


if __name__ == "__main__":
    main()
