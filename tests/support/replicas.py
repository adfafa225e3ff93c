"""DataParallel's replicas on a machine without GPUs: what ``torch.nn.parallel.replicate`` does, with clones."""

from __future__ import annotations

import sys
from unittest import mock

import torch
from torch import nn


def data_parallel(model: nn.Module) -> nn.DataParallel:
    """``nn.DataParallel`` as on a machine without a device, whatever this one has: ``model`` stays where it is."""
    module = sys.modules["torch.nn.parallel.data_parallel"]  # by that name the package has the function, too
    with mock.patch.object(module, "_get_available_device_type", return_value=None):
        return nn.DataParallel(model)


def replicate(model: nn.Module, count: int) -> list[nn.Module]:
    """``count`` replicas whose weights are differentiable copies and not Parameters, as DataParallel's are."""
    if torch.cuda.device_count() >= count:
        return nn.parallel.replicate(model.cuda(), list(range(count)))
    return [_replica(model) for _ in range(count)]


def _replica(model: nn.Module) -> nn.Module:
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    weights: dict[torch.Tensor, torch.Tensor] = {}
    for module, replica in copies.items():
        replica._former_parameters = {}
        for name, child in module._modules.items():
            setattr(replica, name, copies[child])
        for name, parameter in module._parameters.items():
            if parameter is not None:
                copy = weights.setdefault(parameter, parameter.clone())
                setattr(replica, name, copy)
                replica._former_parameters[name] = copy
            else:
                replica._parameters[name] = None
    return copies[model]
