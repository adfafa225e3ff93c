"""DataParallel without GPUs: the same replicas, made and run the way torch makes and runs them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn


def replicate(model: nn.Module, count: int) -> list[nn.Module]:
    """``count`` replicas of ``model``: modules copied shallowly, weights broadcast, which is differentiable."""
    return [_replica(model) for _ in range(count)]


def _replica(module: nn.Module) -> nn.Module:
    replica: nn.Module = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = child and _replica(child)
    weights = {name: weight.clone() for name, weight in module._parameters.items() if weight is not None}
    for name, weight in weights.items():
        setattr(replica, name, weight)
    replica._former_parameters = weights  # type: ignore[assignment]
    return replica


def run(replicas: list[nn.Module], inputs: list[torch.Tensor]) -> torch.Tensor:
    """Each replica on its part of the batch, in a thread of its own; the outputs put together again."""
    outputs: list[Any] = [None] * len(replicas)

    def work(i: int) -> None:
        outputs[i] = replicas[i](inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat(outputs)


class Replicas(nn.Module):
    """``nn.DataParallel(module)`` on ``count`` devices, as far as hooks, threads and gradients go."""

    def __init__(self, module: nn.Module, count: int = 2) -> None:
        super().__init__()
        self.module, self.count = module, count

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return run(replicate(self.module, self.count), list(batch.chunk(self.count)))
