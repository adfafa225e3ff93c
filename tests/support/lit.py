"""A small LightningModule and trainers for it, on one process or two that exist already."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import Block

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
warnings.filterwarnings("ignore", message=".*[Ll]ightning.*|.*litlogger.*")
SAVE = [{"modules": "net.*", "at_least": "1 KiB", "store": {"kind": "OnDisk", "directory": tempfile.gettempdir()}}]
NORMS = {"every": 1, "stats": [{"kind": "Norm"}]}


class Lit(L.LightningModule):
    """Two blocks; keeps what Lightning's own utility says of the gradients before Lightning clips them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options, self.norms = options, []
        self.net = nn.Sequential(Block(16, 2), Block(16, 2))

    def configure_model(self) -> None:
        if self.options.get("shard"):
            from torch.distributed.fsdp import fully_shard

            for part in (*self.net, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        if index == self.options.get("fail"):
            raise RuntimeError("a bad batch")
        torch.manual_seed(self.global_step)  # for dropout
        loss = self.net(batch[0]).square().mean()
        return loss * math.nan if index == self.options.get("nan") else loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        model = self.trainer.model
        if hasattr(model, "get_global_grad_norm"):
            return  # DeepSpeed's is known after its step
        own = _whole_norm(self) if self.options.get("parts") else grad_norm(self, 2).get("grad_2.0_norm_total", 0.0)
        self.norms.append(float(own))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        steps = (index + 1) % self.trainer.accumulate_grad_batches == 0
        if steps and hasattr(self.trainer.model, "get_global_grad_norm"):
            self.norms.append(float(self.trainer.model.get_global_grad_norm()))

    def configure_optimizers(self) -> Any:
        make = self.options.get("make", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
        return make(self.parameters())


def _whole_norm(model: nn.Module) -> torch.Tensor:
    """Lightning's utility sees this rank's parts alone: the root of the sum of squares over ranks."""
    parts = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None]
    square = torch.stack([part.detach().double().square().sum() for part in parts]).sum()
    dist.all_reduce(square)
    return square.sqrt()


class CpuFsdp(FSDPStrategy):
    """Lightning and FSDP1 want a GPU; with ``device_id`` FSDP1 runs on the CPU, and all else is Lightning's."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class CpuDeepSpeed(DeepSpeedStrategy):
    """Without the check for CUDA, with gloo; all else is Lightning's."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()


def strategy_of(name: str, config: dict[str, Any] | None = None) -> Any:
    if name == "fsdp1":
        return CpuFsdp(auto_wrap_policy={Block})
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if name == "deepspeed":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
        zero = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}}
        return CpuDeepSpeed(config={"train_micro_batch_size_per_gpu": 4, **zero, **(config or {})})
    return name


def batches(count: int = 4) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(8 * count, 3, 16, generator=torch.Generator().manual_seed(0))), 4)


def fit(model: L.LightningModule, callbacks: list[Any], ckpt_path: Any = None, count: int = 4, **options: Any) -> Any:
    """One ``fit``; the trainer."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"logger": False, "max_steps": 4, "devices": 1, "num_sanity_val_steps": 2} | quiet | options
    trainer = L.Trainer(accelerator="cpu", callbacks=callbacks, **options)
    world = os.environ.get("WORLD_SIZE")
    try:
        trainer.fit(model, batches(count), batches(1), ckpt_path=ckpt_path)
    finally:
        if world is not None:
            os.environ["WORLD_SIZE"] = world  # Lightning's environment takes it away
    return trainer
