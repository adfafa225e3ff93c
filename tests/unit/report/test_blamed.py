"""blame(): the module that made it and not one that passed it on; nothing changes, nothing waits, nothing is silent."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import disthooks as dh
from disthooks.errors import AttachError, NonFiniteError
from disthooks.report.watch.blame import Blamed
from tests.support.functions import Made
from tests.support.replicas import replicate
from tests.support.threads import together


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - 1).log()


class Block(nn.Module):
    """A division between two children, and a keyword argument on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return self.last(self.act(self.first(x)) / by)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = Block(), Block(), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return self.head(self.two(self.one(x), by=by))


def only(found: Any) -> Blamed:
    (one,) = found.report().found
    return one


def blamed(model: nn.Module, *batches: torch.Tensor) -> Blamed:
    """Who is blamed for forwards of these batches."""
    with dh.blame(model) as found, torch.no_grad():
        for batch in batches:
            model(batch)
    return only(found)


def test_the_one_that_made_it_and_not_those_after_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Log(), nn.Linear(3, 3), nn.ReLU())
    x = torch.zeros(2, 3)
    nn.init.eye_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    with dh.blame(model) as found:
        model(x + 3)
        assert str(found.report()) == "1 forwards, 5 module calls: every output was finite"
        model(x + 3)
        model(x)
        model(x)
    assert only(found) == Blamed(0, 2, "1", "Log", 0, True, True, "1")
    assert found.forwards == 4


def _first_bias_is_one(net: Net) -> None:
    net.two.first.weight.data.zero_()
    net.two.first.bias.data.fill_(1.0)


@pytest.mark.parametrize(
    ("spoil", "by", "said"),
    [
        (
            lambda net: net.two.last.weight.data.fill_(-math.inf),
            1.0,
            ("two.last", "Linear", 0, True, False, "two.last"),
        ),
        (lambda net: None, 0.0, ("two", "Block", 0, True, True, "two.last")),
        (_first_bias_is_one, 0.0, ("two", "Block", 0, True, True, "two.last")),  # +inf, which no mask has
    ],
    ids=["a weight", "code between children", "an overflow between children"],
)
def test_the_module_that_has_the_weight_or_the_code_is_blamed(spoil: Any, by: float, said: tuple[Any, ...]) -> None:
    model = Net()
    spoil(model)
    with dh.blame(model) as found:
        model(torch.ones(4, 3), by=by)
    assert only(found) == Blamed(0, 0, *said)
    assert by or "first seen in the output of two.last, inside it" in str(found.report())


def test_a_bad_batch_is_blamed_on_nobody() -> None:
    """Also one that was filled behind torch's back, which no version counter tells."""
    model, x = Net(), torch.ones(4, 3)
    seen_by_others = x.numpy()
    with dh.blame(model) as found:
        model(x)
        seen_by_others[2, 1] = math.nan
        model(x)
        with torch.no_grad():
            model.head.weight.fill_(math.inf)  # later, and in another forward
        model(torch.ones(4, 3))
    assert only(found) == Blamed(0, 1, "one.first", "Linear", 0, False, True, "one.first")
    assert "its inputs were not finite, and no module before it made them so" in str(found.report())


def test_another_that_makes_one_later_does_not_excuse_the_batch() -> None:
    branches = Made(lambda left, log, x: left(x) + log(torch.zeros(3)), nn.Linear(3, 3), Log())
    assert blamed(branches, torch.full((2, 3), math.nan)) == Blamed(
        0, 0, "parts.0", "Linear", 0, False, True, "parts.0"
    )


def test_an_output_that_is_changed_in_place_afterwards() -> None:
    in_place = Made(lambda fc, x: fc(x).zero_().sub_(1).log_(), nn.Linear(3, 3))
    assert blamed(in_place, torch.ones(2, 3)) == Blamed(0, 0, "", "Made", 0, True, True, "")


def test_weights_are_looked_at_in_every_forward() -> None:
    model = Net()
    with dh.blame(model) as found:
        model(torch.ones(4, 3))
        model.head.bias.data.fill_(math.nan)  # which is not counted as a change
        model(torch.ones(4, 3))
    assert only(found) == Blamed(0, 1, "head", "Linear", 0, True, False, "head")


def test_the_call_that_made_it_is_counted_in_its_forward() -> None:
    twice = Made(lambda log, x: log(log(x * 0 + 4).abs() + 2) + log(x), Log())
    found = blamed(twice, torch.full((2,), 2.0), torch.full((2,), -2.0))
    assert found == Blamed(0, 1, "parts.0", "Log", 2, True, True, "parts.0")


@dataclasses.dataclass
class Output:
    loss: torch.Tensor | None
    states: list[torch.Tensor]


class BaseModelOutput(collections.OrderedDict):
    def __init__(self, t: torch.Tensor) -> None:
        super().__init__(last=t)


@pytest.mark.parametrize(
    "made", [lambda t: {"a": [t, None]}, lambda t: Output(None, [t]), lambda t: (1, (t,)), BaseModelOutput]
)
def test_outputs_in_whatever_they_are_nested(made: Any) -> None:
    assert blamed(Made(lambda x: made(x.log())), torch.tensor([-1.0])).module == ""


@pytest.mark.parametrize("place", [0, 64, 998])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.complex64], ids=str
)
def test_every_dtype_and_place(dtype: torch.dtype, place: int) -> None:
    """The largest numbers are finite. With ``only_nan`` infinity is no fault."""
    good = torch.ones(999).to(dtype)
    good[0], good[1] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    for value in (math.nan, math.inf, -math.inf):
        bad = good.clone()
        bad[place] = value
        for made in (bad, bad.view(27, 37).t()):
            model = Made(lambda x, made=made: made if x.any() else good)
            with dh.blame(model) as found, dh.blame(model, only_nan=True) as lenient:
                model(torch.zeros(1))
                assert found.report().found == ()
                model(torch.ones(1))
            assert only(found).forward == 1
            assert len(lenient.report().found) == math.isnan(value)


def train(attach: bool) -> tuple[list[torch.Tensor], Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = dh.blame(model) if attach else None
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], found


class NoSync(TorchDispatchMode):
    """Raises where an operator would wait for a device, to read a number or to learn a shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "equal", "masked_select")
        return func(*args, **(kwargs or {}))


def test_training_is_bit_identical_and_host_syncs_are_none() -> None:
    plain, _ = train(False)
    with (
        NoSync(),
        mock.patch("disthooks.report.watch.finite._FEW", 4),  # put together within these few steps
    ):
        watched, found = train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    with NoSync(), pytest.raises(AssertionError):
        torch.ones(1)[torch.tensor(0)]
    assert found.report().calls == 3 * 10
    assert found.report().found == ()


def test_nothing_is_kept_alive_and_pending_is_bounded() -> None:
    model = Net()
    with dh.blame(model) as found, torch.no_grad():
        y = model(torch.ones(4, 3))
        gone = weakref.ref(y)
        del y
        gc.collect()
        assert gone() is None
        for _ in range(60):
            model(torch.ones(4, 3))
        (book,) = found._first_calls[False].values()
        assert len(book._pending) < 256
        for _ in range(60):
            model(torch.full((4, 3), math.nan))
    assert only(found).forward == 61


class Checked(nn.Module):
    """A layer, and a block under a checkpoint."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.reentrant = nn.Linear(3, 3), block, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoints_second_forward_is_not_another_one(reentrant: bool) -> None:
    model, x = Checked(Block(), reentrant), torch.ones(4, 3)
    model(x).sum().backward()
    expected = model.first.weight.grad.clone()
    with dh.blame(model) as found:
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
    assert torch.equal(model.first.weight.grad, expected)
    report = found.report()
    assert (report.forwards, report.calls) == (2, 2 * 6)
    assert not found._threads.frames


class Root(nn.Module):
    """Its output is finite at 0, and its derivative is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sqrt()


def rooted(is_zero: bool = False) -> nn.Module:
    """Three layers; the second one is a block that begins with a root, of zeros if ``is_zero``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Root(), nn.Linear(3, 3)), nn.Linear(3, 3))
    return to_zero(model) if is_zero else model


def to_zero(model: Any) -> Any:
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    return model


def test_a_nan_of_backward_is_blamed_on_the_module_that_made_it() -> None:
    model = rooted()
    with dh.blame(model) as found:
        model(torch.ones(4, 3)).sum().backward()
        assert "every output and gradient was finite" in str(found.report())
        to_zero(model)(torch.ones(4, 3)).sum().backward()
        model(torch.full((4, 3), math.nan)).sum().backward()
    assert only(found) == Blamed(0, 1, "1.0", "Root", 0, True, True, "1.0", in_backward=True)
    assert str(found.report()).startswith(
        "first non-finite gradient:\n  rank 0, backward of forward 1: 1.0 (Root), call 0"
    )


def test_what_comes_first_is_reported() -> None:
    model = rooted()
    with dh.blame(model) as found:
        model(torch.full((4, 3), math.nan)).sum().backward()
        to_zero(model)(torch.ones(4, 3)).sum().backward()
    assert (only(found).forward, only(found).in_backward, only(found).module) == (0, False, "0")


def test_a_nan_of_the_code_between_children_in_backward() -> None:
    between = Made(lambda first, last, x: last((first(x) * 0).sqrt()), nn.Linear(3, 3), nn.Linear(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), between, nn.Linear(3, 3))
    with dh.blame(model) as found:
        model(torch.ones(4, 3)).sum().backward()
    assert only(found) == Blamed(0, 0, "1", "Made", 0, True, True, "1.parts.0", in_backward=True)
    assert str(only(found)).endswith("that of its input was not; first seen at the input of 1.parts.0, inside it")


def test_a_nan_of_the_loss_is_blamed_on_no_module() -> None:
    model = Net()
    with dh.blame(model) as found:
        (model(torch.ones(4, 3)).sum() * 0).sqrt().backward()
    one = only(found)
    assert (one.in_backward, one.inputs_finite) == (True, False)
    assert "no module after it made it so: the loss" in str(one)


def test_gradients_of_float16_are_left_out() -> None:
    model = rooted(is_zero=True)
    with dh.blame(model) as found, torch.autocast("cpu", torch.float16):
        model(torch.ones(4, 3)).float().sum().backward()
    assert found.report().found == ()
    assert "gradients: there are some in float16" in str(found.report())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_nan_of_backward_under_a_checkpoint(reentrant: bool) -> None:
    block = to_zero(nn.Sequential(nn.Linear(3, 3), Root(), nn.Linear(3, 3)))
    with dh.blame(model := Checked(block, reentrant)) as found:
        model(torch.ones(4, 3)).sum().backward()
    # A reentrant checkpoint makes the graph of its block in backward, so only what is around it is seen.
    assert only(found).in_backward
    assert (only(found).module, only(found).inputs_finite) == (("first", False) if reentrant else ("block.1", True))


def test_no_hook_stays_on_a_leaf_or_keeps_the_model() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    model = Made(lambda tied, x: tied(x, weight), Made(torch.matmul))
    found = dh.blame(model)
    out = model(torch.ones(2, 3, requires_grad=True))
    assert not weight._backward_hooks
    alive = weakref.ref(model.parts[0])
    found.remove()
    del model, found
    gc.collect()
    assert alive() is None
    out.sum().backward()  # the hooks in the graph do nothing any more


def test_raise_error_stops_at_the_module_and_in_backward() -> None:
    model = Net()
    with dh.blame(model, raise_error=True) as found:
        model(torch.ones(4, 3))
        said = r"forward 1: one.first \(Linear\), call 0: its inputs were not finite"
        with pytest.raises(NonFiniteError, match=said):
            model(torch.full((4, 3), math.inf))
        assert not found._threads.frames
        with pytest.raises(FloatingPointError, match="one"):
            model(torch.full((4, 3), math.inf))
    root = rooted(is_zero=True)
    with dh.blame(root, raise_error=True), pytest.raises(NonFiniteError, match=r"backward of forward 0: 1.0 \(Root\)"):
        root(torch.ones(4, 3)).sum().backward()


def test_an_exception_leaves_no_frame() -> None:
    model = Net()
    with dh.blame(model) as found:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(4, 5))
        assert not found._threads.frames
        model(torch.full((4, 3), math.nan))
    assert only(found).forward == 1


def test_compiled_parts_are_left_out_and_said() -> None:
    model = Net()
    model.two.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"does not look at 4 modules .* \(two, two\.first"):
        found = dh.blame(model)
    model(torch.full((4, 3), math.nan))
    assert only(found).module == "one.first"
    assert "not looked at: 4 modules that were compiled" in str(found.report())
    assert found.report().calls == 1 + 4 + 1  # the model, one with its three, and the head

    with pytest.raises(AttachError, match="code compiled before calls no new hooks"):
        dh.blame(torch.compile(model, backend="eager"))
    with dh.blame(model) as found:
        torch.compile(model, backend="eager")(torch.full((4, 3), math.nan))
    assert "torch.compile ran the model without Python" in str(found.report())


def test_transforms_are_left_alone_and_said() -> None:
    model = nn.Linear(3, 3)
    with dh.blame(model) as found:
        torch.func.vmap(model)(torch.ones(5, 3))
        torch.func.grad(lambda x: model(x).sum())(torch.ones(3))
    assert "2 module calls inside torch.func" in str(found.report())


def test_submodules_called_by_themselves_and_without_grad() -> None:
    model = Net()
    with dh.blame(model) as found, torch.inference_mode():
        model.one(torch.ones(4, 3))
        model.one(torch.full((4, 3), math.nan))
        model(torch.ones(4, 3))
    assert only(found) == Blamed(0, 0, "one.first", "Linear", 1, False, True, "one.first")


def test_replicas_in_threads() -> None:
    model = Net()
    with dh.blame(model) as found:
        replicas = replicate(model, 2)
        with torch.no_grad():
            for replica in replicas:
                replica.one.first.weight.fill_(1e38)
        batches = torch.ones(4, 3), torch.full((4, 3), 1e38)  # the second overflows; no input is bad
        together([functools.partial(*each) for each in zip(replicas, batches, strict=True)])
    one = only(found)
    assert (one.inputs_finite, one.weights_finite, one.forward) == (True, True, 0)
    assert one.kind in ("Linear", "Block")
    assert found.calls == 20


def test_a_nan_of_backward_in_replicas() -> None:
    """Forward runs in threads, and backward in another one."""
    model = rooted()
    with dh.blame(model) as found:
        replicas = replicate(model, 2)
        with torch.no_grad():
            replicas[1][0].weight.zero_()
            replicas[1][0].bias.zero_()
        sum(together([functools.partial(each, torch.ones(4, 3)) for each in replicas])).sum().backward()
    assert only(found) == Blamed(0, 0, "1.0", "Root", only(found).call, True, True, "1.0", in_backward=True)


class Attention(nn.Module):
    """A mask of ``-inf`` goes through it; ``by`` divides between two children."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.soft, self.norm = nn.Identity(), nn.Softmax(-1), nn.LayerNorm(3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, by: float) -> torch.Tensor:
        scores = self.soft(x @ x.T + self.mask(mask))
        return self.norm(scores @ x / by)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.last = nn.Linear(3, 3), Attention(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return self.last(self.attention(self.first(x), mask, by))


def _causal(all_of_it: bool = False) -> torch.Tensor:
    mask = torch.full((4, 4), -math.inf).triu(1)
    mask[2] = -math.inf if all_of_it else mask[2]
    return mask


def test_a_mask_is_no_fault() -> None:
    """Neither of who is given it, nor of who passes it on; one that a module makes is of that module."""
    model = Masked()
    with dh.blame(model, raise_error=True) as found:
        model(torch.randn(4, 3), _causal())
    assert found.report().found == ()
    assert "every output was finite" in str(found.report())

    made = nn.Sequential(Made(lambda x: torch.full_like(x, -math.inf).triu(1)), nn.Softmax(-1))
    with dh.blame(made) as strict, dh.blame(made, only_nan=True) as lenient:
        made(torch.ones(3, 3))
    assert only(strict).module == "0"
    assert lenient.report().found == ()


def test_who_made_it_was_given_a_mask() -> None:
    """The norm inside got it first, and is right; the model had the mask, too."""
    model = Masked()
    with dh.blame(model) as found:
        model(torch.randn(4, 3), _causal())
        model(torch.randn(4, 3), _causal(), by=0.0)
    assert only(found) == Blamed(0, 1, "attention", "Attention", 0, True, True, "attention.norm", True)
    assert "its inputs were finite but for -inf, as in a mask, and its weights were finite" in str(found.report())
    assert Blamed.of(only(found).numbers()) == only(found)


def test_a_row_that_is_all_masked_is_of_who_computes_it() -> None:
    """With ``only_nan`` nobody asks who gave the mask."""
    model = Masked()
    with dh.blame(model) as found, dh.blame(model, only_nan=True) as lenient:
        model(torch.randn(4, 3), _causal())
        assert lenient.report().found == ()
        model(torch.randn(4, 3), _causal(all_of_it=True))
    assert (only(lenient).forward, only(lenient).module) == (1, "attention.soft")
    assert (only(found).module, only(found).masked) == ("attention.soft", True)
