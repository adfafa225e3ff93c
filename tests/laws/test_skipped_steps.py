"""Law 16: a step that is left out leaves every optimizer as it was, and so does Freeze its parameters."""

from __future__ import annotations

import copy
import math
import pickle
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks._torch import Inner, step_wrapper
from disthooks.errors import UsageError

# --- optimizers that do something without gradients too


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


def backward(model: nn.Module, step: int, spoiled: bool = False) -> None:
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


@pytest.mark.parametrize("kind", MAKE)
def test_a_step_that_is_left_out_changes_nothing(kind: str) -> None:
    """The first one too, before any state is there; the steps around it are those of a run without it."""
    model, other = net(), net()
    optimizer, plain = MAKE[kind](model.parameters()), MAKE[kind](other.parameters())
    found = []
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]):
        for step in range(5):
            backward(model, step, step in (0, 3))
            before = everything(model, optimizer)
            optimizer.step()
            if step in (0, 3):
                found.append(same(everything(model, optimizer), before))
            else:
                backward(other, step)
                plain.step()
    assert found == [True, True]
    truth, seen = everything(other, plain), everything(model, optimizer)
    assert same(seen[:4], truth[:4])
    assert not same(seen[0], list(net().parameters()))


@pytest.mark.parametrize("kind", MAKE)
def test_parameters_that_rest_keep_value_and_state(kind: str) -> None:
    model = net()
    optimizer = MAKE[kind](model.parameters())
    first, last = model[0].weight, model[2].weight  # type: ignore[index]
    # torch's fused SGD cannot take a parameter that has a gradient for the first time later than others do
    with dh.gradients(model, optimizer, rules=[dh.only("0.*", dh.Freeze(until=2))]):
        for step in range(2 if kind == "SGD fused" else 4):
            backward(model, step)
            grad = first.grad.clone()
            before = copy.deepcopy([first.detach(), optimizer.state.get(first)])
            moving, held = last.detach().clone(), [group["params"] for group in optimizer.param_groups]
            optimizer.step()
            after = [first.detach(), optimizer.state.get(first)]
            assert torch.equal(before[0], after[0]) == (step < 2)
            assert step >= 2 or same(before, after)
            assert not torch.equal(moving, last)
            assert torch.equal(first.grad, grad)
            assert all(group["params"] is was for group, was in zip(optimizer.param_groups, held, strict=True))


# --- whoever calls the step


def _scheduled(optimizer: Any, attach: Callable[[], Any], early: bool) -> tuple[Any, Callable[[], None]]:
    make = lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)  # noqa: E731
    schedule = make() if early else None
    watch = attach()
    schedule = schedule or make()

    def step() -> None:
        optimizer.step()
        schedule.step()

    return watch, step


def _accelerated(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """accelerate keeps the method that it finds, and puts it back on the optimizer in every step."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    outer = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))
    return attach(), outer.step


def _compiled(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    def step() -> None:
        optimizer.step()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    return attach(), compiled


def _kept(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    method = optimizer.step
    return attach(), method


def _in_no_grad(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    return attach(), torch.no_grad()(lambda: optimizer.step())


def _replaced(optimizer: Any, attach: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Somebody has a step of their own on the object, around the class's."""
    true = optimizer.step
    optimizer.step = types.MethodType(lambda self: true(), optimizer)
    return attach(), lambda: optimizer.step()


WAYS: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "a schedule, made before": lambda o, a: _scheduled(o, a, True),
    "a schedule, made after": lambda o, a: _scheduled(o, a, False),
    "accelerate with a scaler": _accelerated,
    "compiled": _compiled,
    "a method kept from before": _kept,
    "no_grad": _in_no_grad,
    "replaced on the object": _replaced,
    "by the class": lambda o, a: (a(), lambda: type(o).step(o)),
}


@pytest.mark.parametrize("way", WAYS)
def test_whoever_calls_the_step(way: str) -> None:
    model = net()
    optimizer = Counts(model.parameters())
    function = Inner(step_wrapper(Counts)).function
    attach = lambda: dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], every=1)  # noqa: E731
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        watch, step = WAYS[way](optimizer, attach)
        moved = []
        for number in range(4):
            backward(model, number, number in (0, 2))
            before = everything(model, optimizer)
            step()
            moved.append(not same(everything(model, optimizer)[0], before[0]))
    own = vars(optimizer).get("step")
    assert moved == [False, True, False, True]
    assert (optimizer.param_groups[0]["step"], watch.steps) == (2, 4)
    watch.remove()
    assert vars(optimizer).get("step") is own
    assert Inner(step_wrapper(Counts)).function is function
    assert not optimizer._optimizer_step_pre_hooks
    backward(model, 4, True)
    step()
    assert optimizer.param_groups[0]["step"] == 3


def test_another_optimizer_of_the_class_is_left_alone() -> None:
    model, other = net(), net()
    optimizer, plain = Counts(model.parameters()), Counts(other.parameters())
    first = dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()])
    second = dh.gradients(model, optimizer, rules=[dh.Scale(0.5)])
    for net_ in (model, other):
        backward(net_, 0, True)
    first.remove()
    plain.step()
    assert math.isnan(float(other[0].weight.detach()[0, 0]))  # type: ignore[index]
    backward(model, 0)
    grad = model[0].weight.grad.clone()  # type: ignore[index, union-attr]
    optimizer.step()
    assert torch.equal(model[0].weight.grad, grad * 0.5)  # type: ignore[index, arg-type]
    second.remove()
    assert not hasattr(Inner(step_wrapper(Counts)).function, "seam")


def test_copies_and_pickles_are_plain() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]) as watch:
        backward(model, 0)
        optimizer.step()
        copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
        assert "disthooks" not in str(pickle.dumps(optimizer))
        for each in (copied, pickled):
            for group in each.param_groups:
                for p in group["params"]:
                    p.grad = torch.full_like(p, math.nan)
            each.step()
            assert math.isnan(float(each.param_groups[0]["params"][0].detach()[0, 0]))
        assert watch.steps == 1


def test_a_step_that_raises_gives_gradients_and_groups_back() -> None:
    class Breaks(Own):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise KeyError("its own")

    model = net()
    optimizer = Breaks(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.only("0.*", dh.Freeze())]):
        backward(model, 0)
        with pytest.raises(KeyError, match="its own"):
            optimizer.step()
        assert len(optimizer.param_groups[0]["params"]) == 2
        assert all(p.grad is not None for p in model.parameters())


# --- closures


def _closed(model: nn.Module, optimizer: Any, step: int, spoiled: bool = False, seen: list[float] | None = None) -> Any:
    def closure() -> torch.Tensor:
        backward(model, step, spoiled)
        if seen is not None:
            seen.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))  # type: ignore[union-attr]
        return torch.tensor(float(step))

    return optimizer.step(closure)


@pytest.mark.parametrize("kind", ["SGD", "Counts", "AdamW fused"])
def test_rules_act_when_the_closure_is_done(kind: str) -> None:
    model, other = net(), net()
    optimizer, plain = MAKE[kind](model.parameters()), MAKE[kind](other.parameters())
    rules = [dh.SkipNonFinite(), dh.only("0.*", dh.Freeze()), dh.ClipValue(0.01)]
    with dh.gradients(model, optimizer, rules=rules, every=1) as watch, dh.gradients(other, plain, rules=rules):
        for step in range(4):
            assert float(_closed(model, optimizer, step, step in (0, 2))) == step  # the loss comes back
            backward(other, step, step in (0, 2))
            plain.step()
            assert same(everything(model, optimizer)[:4], everything(other, plain)[:4])
    assert watch.latest["skipped_total"] == 2
    assert watch.steps == 4


def test_an_optimizer_that_moves_before_its_closure_cannot_skip() -> None:
    class Looks(Own):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for _, p in self.each():
                p.data.add_(0.1)  # counted nowhere
            torch.enable_grad()(closure)()
            for group, p in self.each():
                p.data.sub_(0.1).sub_(p.grad, alpha=group["lr"])

    model = net()
    optimizer = Looks(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite(), dh.ClipNorm(0.5)], every=1) as watch:
        _closed(model, optimizer, 0)
        with pytest.raises(UsageError, match=r"Looks changed its parameters.*before it called the closure"):
            _closed(model, optimizer, 1, True)
    assert watch.latest["grad_norm_clipped"] <= 0.5 or math.isnan(watch.latest["grad_norm_clipped"])


def test_a_parameter_that_has_become_nan_is_no_change() -> None:
    """The optimizer moved nothing before its closure, so the step is left out and not refused."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[0] = math.nan
    before = copy.deepcopy(list(model.parameters()))
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], every=1) as watch:
        _closed(model, optimizer, 0)
    assert watch.latest["skipped"] == 1
    for mine, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(mine, was, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind.endswith("fused")])
def test_a_step_that_the_scaler_and_a_rule_leave_out(kind: str) -> None:
    """Two reasons are one: a fused kernel makes no update where it is told 1, and one of NaN where it is told 2."""
    model = net()
    optimizer = MAKE[kind](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], every=1) as watch:
        for step in range(4):
            backward(model, step, step == 2)
            for parameter in model.parameters():
                parameter.grad.mul_(8.0)  # type: ignore[union-attr]
            scaler.scale(torch.ones(()))  # as if it had scaled the loss
            scaler.unscale_(optimizer)
            before = everything(model, optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert same(everything(model, optimizer), before) == (step == 2)
    assert watch.latest["skipped_total"] == 1


def test_statistics_of_lbfgs_are_of_its_first_call() -> None:
    model, other = net(), net()
    makes = dict(lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    optimizer, plain = (torch.optim.LBFGS(m.parameters(), **makes) for m in (model, other))  # type: ignore[arg-type]
    records: list[Any] = []
    firsts = []
    with dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[records.append], every=1):
        for step in range(3):
            seen: list[float] = []
            _closed(model, optimizer, step, seen=seen)
            _closed(other, plain, step)
            assert len(seen) > 1
            firsts.append(seen[0])
    assert same(list(model.parameters()), list(other.parameters()))
    assert [record["grad_norm"] for record in records] == pytest.approx(firsts)


def test_rules_for_lbfgs_are_refused_before_anything_moves() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]), pytest.raises(UsageError, match="more than once"):
        _closed(model, optimizer, 0)
    assert same(list(model.parameters()), list(net().parameters()))
    assert not optimizer.state


def test_on_gradient_sees_each_call_of_lbfgs() -> None:
    model, other = net(), net()
    optimizer, plain = (torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (model, other))
    calls = []

    def closure() -> torch.Tensor:
        backward(other, 0)
        other[0].weight.grad.zero_()  # type: ignore[index, union-attr]
        calls.append(1)
        return torch.tensor(1.0)

    with dh.on_gradient(model, "0.weight", torch.zeros_like) as hook:
        _closed(model, optimizer, 0)
        plain.step(closure)
    assert hook.report() == {"0.weight": len(calls)}
    assert len(calls) > 1
    assert same(list(model.parameters()), list(other.parameters()))
    assert not optimizer._optimizer_step_pre_hooks


def test_a_closure_that_is_never_called() -> None:
    model = net()
    optimizer = Raises(model.parameters())
    backward(model, 0)
    with (
        dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]),
        pytest.raises(UsageError, match="never called its closure"),
    ):
        optimizer.step(lambda: None)


# --- one function for all optimizers, before what is attached to one of them


@pytest.mark.parametrize("begun", [False, True])
def test_on_gradient_comes_before_the_rules(begun: bool) -> None:
    """In a step that is begun early too: what it makes of a gradient is clipped."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[dh.stats.Norm()], every=1) as watch,
        dh.on_gradient(model, "*", lambda grad: grad * 100) as hook,
    ):
        for step in range(3):
            backward(model, step)
            true = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())  # type: ignore[union-attr]
            if begun:
                watch.begin_step()
            optimizer.step()
            watch.flush()
            norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())  # type: ignore[union-attr]
            assert watch.latest["grad_norm"] == pytest.approx(true * 100, rel=1e-5)
            assert norm == pytest.approx(1.0, rel=1e-5)
    assert hook.report() == {"0.weight": 3, "2.weight": 3}
