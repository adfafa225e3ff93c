"""trace(): the order of the hooks, what it prints, and that tracing changes nothing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disthooks as dh
from disthooks._torch import top_hooks
from disthooks.errors import MatchError
from tests.support.replicas import replicate
from tests.support.threads import together


class Structured(nn.Module):
    """A dict of a tuple; a module whose inputs need no gradient, another called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.both = nn.Bilinear(4, 4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.fc(x)
        return {"main": (self.both(input1=h, input2=h), h), "n": 3}


class Views(nn.Module):
    """Views, and changes in place of module outputs and of views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act = nn.ReLU(inplace=True)
        self.same = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.fc(x))
        h += 1
        self.act(h[:, :2])
        return self.same(h).t().chunk(2)[0]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def leaves(value: object) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def step(model: nn.Module) -> list[torch.Tensor]:
    """Outputs and gradients of one step, of the input too."""
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(5, 3, requires_grad=True)
    outputs = leaves(model(x))
    sum(y.square().sum() for y in outputs).backward()
    grads = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    return [t.detach().clone() for t in (*outputs, *grads)]


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def hooks_of(model: nn.Module) -> int:
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    count = sum(len(getattr(part, kind)) for part in model.modules() for kind in kinds)
    for leaf in model.parameters():
        count += len(leaf._backward_hooks or ()) + len(leaf._post_accumulate_grad_hooks or ())
    return count


@pytest.mark.parametrize("make", [Structured, Views])
def test_outputs_and_gradients_are_bit_identical_and_nothing_is_left(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    expected = step(twin)
    with dh.trace(model, print=None) as traced:
        assert same(step(model), expected)
    assert traced.events
    assert hooks_of(model) == 0
    assert top_hooks(True) is None


def test_shapes_sizes_and_times() -> None:
    model = plain()
    with dh.trace(model, print=None) as traced:
        model(torch.randn(5, 3))
    begins = [(e.name, e.shape, e.nbytes) for e in traced.events if e.kind == "forward_pre"]
    assert begins == [("", (5, 3), 60), ("0", (5, 3), 60), ("1", (5, 8), 160), ("2", (5, 8), 160)]
    rows = {row.name: row for row in traced.report().rows}
    assert [rows[name].nbytes for name in ("0", "1", "2", "")] == [160, 160, 40, 40]
    assert rows[""].seconds >= rows["0"].seconds > 0
    assert rows["2"].shape == (5, 2)
    assert "Sequential" in str(traced.report())


def test_structures_have_structures_of_shapes() -> None:
    model = Structured()
    with dh.trace(model, print=None) as traced:
        step(model)
    ends = {e.name: e.shape for e in traced.events if e.kind == "forward"}
    assert ends[""] == {"main": ((5, 2), (5, 4)), "n": None}
    begins = {e.name: e.shape for e in traced.events if e.kind == "forward_pre"}
    assert begins["both"] == ((5, 4), (5, 4))


def test_it_prints_one_line_for_each_module(capsys: pytest.CaptureFixture[str]) -> None:
    model = plain()
    with dh.trace(model):
        model(torch.randn(5, 3))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "(model)"]
    assert "(5, 8)" in lines[0]
    assert lines[0].endswith("ms  160 B")


def test_depth_and_patterns() -> None:
    lines: list[str] = []
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), nn.Linear(8, 2))
    with dh.trace(model, print=lines.append, depth=1):
        step(model)
    assert [line.split()[0] for line in lines] == ["0", "1", "(model)"]
    with dh.trace(model, "0.*", nn.Linear, print=None) as traced:
        step(model)
    assert {e.name for e in traced.events if e.kind == "forward"} == {"0.0", "0.1", "1"}
    with dh.trace(model, depth=1, print=None) as traced:
        model(torch.randn(5, 3))
    assert {row.name: row.nbytes for row in traced.report().rows} == {"0": 160, "1": 40, "": 40}


def test_a_module_that_lies_too_deep_is_an_error() -> None:
    with pytest.raises(MatchError, match="deeper than depth=0"):
        dh.trace(plain(), "0", depth=0)


class Boom(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return x * x


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_an_exception_leaves_no_hooks_and_the_trace_goes_on(error: BaseException) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Boom(error))
    with dh.trace(model, print=None) as traced:
        with pytest.raises(type(error)):
            model(torch.randn(2, 3))
        model(torch.randn(2, 3))
    assert hooks_of(model) == 0
    ends = 2 if isinstance(error, ValueError) else 1  # torch calls no hook after a KeyboardInterrupt
    assert {row.name: row.calls for row in traced.report().rows} == {"0": 2, "1": ends, "": ends}
    assert {event.note for event in traced.events} == ({"", "raised ValueError"} if ends == 2 else {""})


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpointing_stays_checkpointing(reentrant: bool, inside: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = plain()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Checkpointed()
    expected = step(copy.deepcopy(model))
    with dh.trace(model if inside else model.block, print=None) as traced:
        assert same(step(model), expected)
    blocks = [e for e in traced.events if e.kind == "forward" and e.type == "Sequential"]
    assert len(blocks) == 2  # forward, and again in backward


def test_torch_func_goes_through_around_the_model_and_inside() -> None:
    class Slope(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda t: t.square().sum())(x)

    model = plain()
    params = {name: p.detach() for name, p in model.named_parameters()}
    with dh.trace(model, print=None) as traced:
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (torch.ones(2, 3),)).sum())(params)
    assert traced.report().rows[-1].name == ""
    model = Slope()
    with dh.trace(model, print=None) as traced:
        assert torch.equal(model(torch.ones(2)), torch.tensor([2.0, 2.0]))
    assert traced.events[-1].shape == (2,)


def test_a_lazy_model_can_be_traced() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with dh.trace(model, print=None) as traced:
        step(model)
    assert traced.report().rows[0].shape == (5, 4)


def test_replicas_in_threads() -> None:
    model = plain()
    with dh.trace(model, print=None) as traced:
        replicas = replicate(model, 4)
        outputs = together([functools.partial(replica, torch.randn(5, 3)) for replica in replicas])
        torch.cat(outputs).sum().backward()
    rows = {row.name: row for row in traced.report().rows}
    assert rows[""].calls == 4
    assert rows[""].nbytes == 40


def test_no_value_is_ever_read() -> None:
    """On the meta device there are none: whatever would wait for a device raises there."""
    model, x = Views().to("meta"), torch.empty(5, 3, device="meta")
    with dh.trace(model, print=None) as traced, dh.features(model, "*", copy=True) as seen:
        model(x).sum().backward()
    assert seen["fc"].shape == (5, 4)
    assert str(traced.report())
