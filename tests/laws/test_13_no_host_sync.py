"""Law 13, no host sync.

"Between logged steps nothing waits for the device; a logged value is read one step late."

This file shows it without a GPU: all that is done to gradients is done to tensors on "meta", which have no values to
wait for. What needs a value on the host (`item()`, a branch, `nonzero`, an index made of booleans) raises there, and
so does a copy between host and device that waits. Tensors on "meta" take the same paths in the code as tensors on
CUDA, because the code only asks whether a tensor is on the CPU. On a real device tests/gpu asks for the same by
``torch.cuda.set_sync_debug_mode``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import disthooks as dh
from disthooks import stats
from disthooks.engines import skip
from disthooks.grads import records
from disthooks.grads.attach import Gradients

RULES: list[list[Any]] = [
    [dh.ClipNorm(1.0), dh.only("*.bias", dh.ClipNorm(0.5)), dh.ClipValue(0.1)],
    [dh.ClipNorm(1.0, by="parameter"), dh.ClipNorm(1.0, float("inf"))],
    [dh.only("head.*", dh.ClipValue(0.1), at="local")],
    [dh.SkipNonFinite(max_consecutive=3), dh.ClipAdaptive(), dh.ClipPercentile(window=5), dh.ClipZScore(max_norm=1.0)],
    [dh.ClipZScore(to="mean"), dh.ClipZScore(to="threshold"), dh.only("embed.*", dh.Freeze(until=1))],
    [dh.Scale(0.5), dh.Sanitize(), dh.Noise(0.1)],
    [dh.only("embed.*", dh.Noise(0.1, alike=False), at="local"), dh.only("mid.*", dh.Sanitize(), at="local")],
]


class HostSync(AssertionError):
    """Something waited for the device."""


class _Copies(TorchDispatchMode):
    """Refuses copies between host and device that wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        made = func(*args, **kwargs)
        places = {t.device.type for t in [*tensors, *([made] if isinstance(made, torch.Tensor) else [])] if t.dim()}
        waits = not kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
        if func._schema.name in ("aten::_to_copy", "aten::copy_") and len(places) > 1 and waits:
            raise HostSync(f"{func} between {sorted(places)}")
        return made


def _not_read(self: Gradients) -> None:
    """Does nothing: a record is made of values, and tensors on "meta" have none."""


class Still(torch.optim.Optimizer):
    """Does nothing in its steps, as a fused optimizer does nothing that waits."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def valueless() -> Iterator[None]:
    with (
        _Copies(),
        mock.patch.object(records.HostCopy, "__init__", return_value=None),  # what is read one step late
        mock.patch.object(records.HostCopy, "arrived", return_value=False),
        mock.patch.object(records.HostCopy, "tensors", return_value=[torch.zeros(())]),
        mock.patch.object(Gradients, "flush", _not_read),
        mock.patch.object(skip, "FUSED", (Still,)),  # what is told to skip on the device
    ):
        yield


def _train(rules: list[Any], watched: list[Any]) -> None:
    """Train without autograd, because its threads ask the driver for the device."""
    model = nn.Module()
    for name, shape in (("embed", (7, 6)), ("mid", (9000,)), ("head", (3, 5)), ("bias", (7,))):
        part = nn.Module()
        part.weight = nn.Parameter(torch.empty(shape, device="meta"))
        model.register_module(name, part)
    model.embed.bias = nn.Parameter(torch.empty(7, device="meta", dtype=torch.bfloat16))
    optimizer = Still(model.parameters())
    with dh.gradients(model, optimizer, rules=rules, stats=watched, every=2, groups={"mid": "mid.*"}) as watch:
        for _ in range(3):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.ones_like(parameter)
                watch._runner.local_hooks._hook(index, parameter.grad.clone())
            assert {p.grad.device.type for p in model.parameters()} == {"meta"}
            optimizer.step()


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rules_never_wait(valueless: None, rules: list[Any]) -> None:
    _train(rules, [])


STATS: list[Any] = [stats.Norm(per_parameter=True), stats.Norm(1.0), stats.MaxAbs(), stats.NonFinite(), stats.Moments()]


STATS += [stats.Extremes(), stats.Zeros(), stats.Histogram(), stats.Histogram(per_parameter=True), stats.Weights()]


STATS += [stats.Updates(), stats.Spread(), stats.NoiseScale(), stats.Agreement("head.*")]


@pytest.mark.parametrize("stat", STATS, ids=str)
def test_statistics_never_wait(valueless: None, stat: Any) -> None:
    _train([], [stat])


def _reads(name: str, grad: torch.Tensor) -> torch.Tensor:
    return grad / grad.abs().max().item()


def _branches(name: str, grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.sum() > 0 else -grad


def _copies(name: str, grad: torch.Tensor) -> torch.Tensor:
    return grad * torch.ones(grad.shape).to("meta")


@pytest.mark.parametrize("rule", [_reads, _branches, _copies, lambda name, grad: grad[grad > 0].sum() * grad])
def test_a_rule_that_waits_is_noticed(valueless: None, rule: Any) -> None:
    with pytest.raises((HostSync, RuntimeError, NotImplementedError), match=r"meta|nonzero|item|copy"):
        _train([rule], [])
