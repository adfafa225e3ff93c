"""This process among the others: its device, the model on its engine, and numbers brought together."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import disthooks.memory


class Ranks(NamedTuple):
    """Which of how many processes this is, and where it computes."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each of ``values`` added up over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each of ``values`` on any rank."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()

    def synchronise(self) -> None:
        """Wait for the device, so that a clock read next is right."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def start(engine: str) -> Ranks:
    """Join the process group that the launcher described; alone if asked to, or started without one."""
    alone = engine == "plain" or "WORLD_SIZE" not in os.environ
    if alone:
        _leave_all_but_the_first()
    device = _device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if alone else None
    rank, world = (0, 1) if alone else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=bound)
    return Ranks(rank, world, device)


def _leave_all_but_the_first() -> None:
    if int(os.environ.get("RANK", 0)) > 0:
        sys.exit(0)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        print("--engine plain is one process: the other ranks have left", flush=True)
        torch.set_num_threads(os.cpu_count() or 1)  # the launcher gave this rank its share of the cores only


def stop() -> None:
    """Leave the process group; the model on its engine must be gone by now.

    DDP's reducer holds the group too. If it is the last to do so it destroys the group with the interpreter's
    lock held, while a thread of gloo that is dropping the last tensor waits for that lock: now and then
    a process never ends (torch 2.13, https://github.com/pytorch/pytorch/issues/56297).
    """
    gc.collect()
    dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise SystemExit(
            f"local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} here): start at most that "
            "many processes (NPROC=...), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def on_engine(engine: str, model: nn.Module, blocks: nn.ModuleList, ranks: Ranks) -> nn.Module:
    """``model`` as the engine runs it; with FSDP2 it is the same object, its blocks sharded one by one."""
    if engine == "ddp":
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if engine == "fsdp2":
        mesh = dist.init_device_mesh(ranks.device.type, (ranks.world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def reset_peak(ranks: Ranks) -> None:
    """Start the peak of memory anew from what is in use now."""
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        disthooks.memory.reset_peak_resident()


def peak(ranks: Ranks) -> int:
    """Most bytes in use since the last reset: allocated on the GPU, resident where there is none."""
    if ranks.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return disthooks.memory.peak_resident()
