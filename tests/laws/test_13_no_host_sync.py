"""Law 13, no host sync.

"Between logged steps nothing waits for the device; a logged value is read one step late."

This file shows it without a GPU: all that is done to gradients is done to tensors on "meta", which have no values to
wait for. What needs a value on the host (`item()`, a branch, `nonzero`, an index made of booleans) raises there, and
so does a copy between host and device that waits. Tensors on "meta" take the same paths in the code as tensors on
CUDA, because the code only asks whether a tensor is on the CPU. On a real device tests/gpu asks for the same by
``torch.cuda.set_sync_debug_mode``. A number becomes a tensor on "meta" without a copy, so the last tests run on the
simulated accelerator, which counts copies.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import disthooks as dh
from disthooks import stats
from disthooks.engines import skip
from disthooks.engines.base import Engine
from disthooks.grads import records
from disthooks.grads.attachment import Gradients
from disthooks.grads.rules.base import Rule, Work
from tests.support import no_warning
from tests.support.sim import simulated
from tests.support.sim.carried import no_waits

RULES: list[list[Any]] = [
    [dh.ClipNorm(1.0), dh.only("*.bias", dh.ClipNorm(0.5)), dh.ClipValue(0.1)],
    [dh.ClipNorm(1.0, by="parameter"), dh.ClipNorm(1.0, float("inf"))],
    [dh.only("head.*", dh.ClipValue(0.1), at="local")],
    [dh.SkipNonFinite(max_consecutive=3), dh.ClipAdaptive(), dh.ClipPercentile(window=5), dh.ClipZScore(max_norm=1.0)],
    [dh.ClipZScore(to="mean"), dh.ClipZScore(to="threshold")],
    [dh.Scale(0.5), dh.Sanitize()],
    [dh.SkipSpike(loss=False), dh.AdaGC(warmup_steps=1), dh.ClipNorm({0: 2.0, 5: 1.0})],
    [dh.only("embed.*", dh.Scale(0.5), at="local"), dh.only("mid.*", dh.Sanitize(), at="local")],
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
        mock.patch.object(records.StepNumbers, "send", return_value=None),  # what is read one step late
        mock.patch.object(records.StepNumbers, "arrived", return_value=False),
        mock.patch.object(records.StepNumbers, "read", return_value=None),
        mock.patch.object(Gradients, "flush", _not_read),
        mock.patch.object(skip, "FUSED", (Still,)),  # what is told to skip on the device
    ):
        yield


def _train(rules: list[Any], watched: list[Any], **options: Any) -> None:
    """Train without autograd, because its threads ask the driver for the device."""
    model = nn.Module()
    for name, shape in (("embed", (7, 6)), ("mid", (9000,)), ("head", (3, 5)), ("bias", (7,))):
        part = nn.Module()
        part.weight = nn.Parameter(torch.empty(shape, device="meta"))
        model.register_module(name, part)
    model.embed.bias = nn.Parameter(torch.empty(7, device="meta", dtype=torch.bfloat16))
    optimizer = Still(model.parameters())
    options |= {"every": 2, "groups": {"mid": "mid.*"}}
    with dh.gradients(model, optimizer, rules=rules, stats=watched, **options) as watch:
        for _ in range(3):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.ones_like(parameter)
                watch._runner.local_hooks._hook(index, parameter.grad.clone())
            assert {p.grad.device.type for p in model.parameters()} == {"meta"}
            optimizer.step()


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rules_never_wait(valueless: None, rules: list[Any]) -> None:
    _train(rules, [])


STATS: list[Any] = [
    *(stats.Norm(per_parameter=True), stats.Norm(1.0), stats.MaxAbs(), stats.NonFinite(), stats.Moments()),
    *(stats.Extremes(), stats.Zeros(), stats.Histogram(), stats.Histogram(per_parameter=True), stats.Weights()),
    *(stats.Updates(), stats.Updates(per_parameter=True), stats.Spread(), stats.RankMaxAbs(per_parameter=True)),
    *(stats.NoiseScale(), stats.Loss(), stats.Times(), stats.Activations(), stats.Fingerprints()),
]


@pytest.mark.parametrize("stat", STATS, ids=str)
def test_statistics_never_wait(valueless: None, stat: Any) -> None:
    _train([], [stat])


def test_the_search_for_spikes_never_waits(valueless: None) -> None:
    _train([], [stats.NonFinite(), stats.Norm()], recent=4)


WAITS: dict[str, Any] = {
    "reads": lambda name, grad: grad / grad.abs().max().item(),
    "branches": lambda name, grad: grad if grad.sum() > 0 else -grad,
    "copies": lambda name, grad: grad * torch.ones(grad.shape).to("meta"),
    "selects": lambda name, grad: grad[grad > 0].sum() * grad,
}


@pytest.mark.parametrize("way", WAITS)
def test_a_rule_that_waits_is_noticed(valueless: None, way: str) -> None:
    with pytest.raises((HostSync, RuntimeError, NotImplementedError), match=r"meta|nonzero|item|copy"):
        _train([WAITS[way]], [])


LOCAL = dh.only("*", dh.Scale(0.5), at="local")


@pytest.mark.parametrize("rules", [[dh.ClipNorm(1.0)], [LOCAL]], ids=["final", "local"])
def test_a_scale_on_the_host_is_not_copied(device: torch.device, rules: list[Any]) -> None:
    """DeepSpeed's loss scale is a float. ``torch.as_tensor(scale, device=...)`` waits for the device."""
    model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=False, foreach=False)
    x = torch.ones(3, 4, device=device)
    with (
        mock.patch.object(Engine, "gradient_scale", return_value=8.0),
        dh.gradients(model, optimizer, rules=rules, stats=[stats.Norm(), stats.Spread()], every=100),
    ):
        model(x).sum().backward()
        optimizer.step()  # the step that is logged
        with without_copies(device):
            model(x).sum().backward()
            optimizer.step()


@contextlib.contextmanager
def without_copies(device: torch.device) -> Iterator[None]:
    """Inside the host waits for no copy and no operator. On the simulated device a look at an event that came counts as
    a wait, which is all that reading a step late does.
    """
    if device.type == "cuda":
        with no_waits(device):
            yield
        return
    with simulated.counted() as counts:
        yield
    names = ("to_device_blocking", "to_host_blocking", "operator_waits", "device_waits", "stream_waits")
    assert not any(counts[name] for name in names), dict(counts)


def test_an_optimizer_that_makes_the_host_wait_is_named_once(device: torch.device) -> None:
    skip._warn_of_wait.cache_clear()
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(torch.ones(3, 4, device=device)).sum().backward()
        optimizer.step()

    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]):
        with pytest.warns(UserWarning, match=r"AdamW .* waits for the device each time: give AdamW fused=True"):
            step()
        with no_warning():
            step()
    skip._warn_of_wait.cache_clear()


def test_on_the_cpu_no_optimizer_makes_the_host_wait() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()


@dataclass(frozen=True)
class LogsOnTheHost(Rule):
    def rewrite(self, work: Work) -> None:
        work.log["from_the_host"] = torch.tensor(3.0)


def test_a_rule_of_a_users_own_may_log_a_number_of_the_host(device: torch.device) -> None:
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records: list[dict[str, Any]] = []
    rules, sinks = [LogsOnTheHost()], [records.append]
    with dh.gradients(model, optimizer, rules=rules, stats=[stats.Norm()], sinks=sinks, every=1):
        for _ in range(10):  # a copy from the device that is read too early has arrived by chance, now and then
            model(torch.ones(3, 4, device=device)).sum().backward()
            optimizer.step()
    assert all(record["from_the_host"] == 3.0 and record["grad_norm"] > 0 for record in records[:10])
