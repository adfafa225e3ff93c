"""Optimizers of every kind, and a small model to step: what a step changed is told by everything and same."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Own(torch.optim.Optimizer):
    """What the faulty ones have in common."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    def each(self) -> Iterator[tuple[dict[str, Any], Any]]:
        yield from ((group, p) for group in self.param_groups for p in group["params"])


class Counts(Own):
    """A count for each group, whatever there is to do, as in most of pytorch-optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["step"] += 1
        for group, p in self.each():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-group["lr"] / group["step"])
        return loss


class Fills(Own):
    """Takes a missing gradient for zeros, and has momentum and decay, as Muon."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p in self.each():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad)
            p.mul_(0.99).add_(momentum, alpha=-group["lr"])


class Raises(Own):
    """Wants every gradient, as some of second order."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p in self.each():
            p.add_(p.grad, alpha=-group["lr"])


class Averages(Own):
    """Counts for all of it and averages its weights, as schedulefree."""

    k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.k += 1
        for group, p in self.each():
            z = self.state[p].setdefault("z", p.clone())
            if p.grad is not None:
                z.sub_(p.grad, alpha=group["lr"])
            p.lerp_(z, 1 / self.k)


class Unhooked(torch.optim.Optimizer):
    """Wraps another one without calling ``Optimizer.__init__``, as pytorch-optimizer's Lookahead."""

    def __init__(self, params: Any) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.inner, self.count = torch.optim.SGD(params, lr=0.1, momentum=0.9), 0
        self.param_groups, self.state = self.inner.param_groups, self.inner.state  # type: ignore[assignment]
        self.defaults = self.inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.inner.step()


OWN = {kind.__name__: kind for kind in (Counts, Fills, Raises, Averages, Unhooked)}


TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}


for name in ("Optimizer", "SparseAdam", "LBFGS"):  # no optimizer, no dense gradients, no step without a closure
    del TORCH[name]


FUSED = {
    f"{kind.__name__} fused": lambda p, kind=kind, kw=kw: kind(p, lr=0.1, fused=True, **kw)
    for kind, kw in (
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {}),
    )
}


MAKE: dict[str, Callable[[Any], Any]] = {**OWN, **TORCH, **FUSED}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))  # Muon has no biases


def backward(model: nn.Module, step: float, spoiled: bool = False) -> None:
    model.zero_grad()
    model(torch.linspace(-1, 1, 6).view(2, 3) + step).square().sum().backward()
    if spoiled:
        model[0].weight.grad[0, 0] = math.nan  # type: ignore[index]


def everything(model: nn.Module, optimizer: Any) -> Any:
    own = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float)) and not k.startswith("_")}
    state = [optimizer.state.get(parameter) for parameter in model.parameters()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    held = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    return copy.deepcopy([list(model.parameters()), state, groups, own, held])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else bool(a == b)


def small(**options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def closed(model: nn.Module, optimizer: Any, step: int, spoiled: bool = False, seen: list[float] | None = None) -> Any:
    """A step by a closure, which appends the norm of its gradients to ``seen`` and returns the number of the step."""

    def closure() -> torch.Tensor:
        backward(model, step, spoiled)
        if seen is not None:
            seen.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))  # type: ignore[union-attr]
        return torch.tensor(float(step))

    return optimizer.step(closure)
