"""Law 1, exact, for the proofs of Recompute: a proof holds for every later step, or it is not taken for a proof."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import StoreError
from disthooks.saved.pipeline import pipeline
from disthooks.saved.recompute import verify
from disthooks.saved.recompute.verify import Proofs, Verification


class Behind(nn.Module):
    """Saves the input of ``function``, and then its result."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        return x.sin().sum() + self.function(x).cos().sum()  # both save what they take


def _same_in_all(model: nn.Module, inputs: list[torch.Tensor], train: Callable[[int], bool] = lambda _: True) -> bool:
    """Whether bytes were computed again, if torch shows what a node saved; each gradient is checked in any case."""

    def grad(number: int) -> torch.Tensor:
        torch.manual_seed(number)
        model.train(train(number))
        x = inputs[number].clone().requires_grad_()
        (found,) = torch.autograd.grad(model(x), x)
        return found

    truth = [grad(number) for number in range(len(inputs))]
    with dh.save_activations(model, "", pipeline(dh.Recompute(), dh.OnCpu(), at_least=0)) as saving:
        for number, right in enumerate(truth):
            assert torch.equal(grad(number), right), number
    return saving.report().recomputed > 0


def _inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, dry: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.zeros(shape, dtype=dtype)] * dry + [torch.randn(shape).to(dtype) for _ in range(8)]


def test_a_dropout_that_is_off_keeps_everything() -> None:
    """Its node has the same p and the same kind of mask as one that is on."""
    model = Behind(lambda x: torch.native_dropout(x, 0.5, model.training)[0])
    assert _same_in_all(model, _inputs((32, 32)), lambda number: number < 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dropout_of_each_dtype_is_computed_again(dtype: torch.dtype) -> None:
    assert _same_in_all(Behind(lambda x: torch.native_dropout(x, 0.3, True)[0]), _inputs((16, 16), dtype))


@pytest.mark.parametrize("shape", [(7, 3), (33, 31)], ids=str)
@pytest.mark.parametrize("way", ["clone", "contiguous"])
def test_a_copy_in_another_order_of_strides_is_computed_again(way: str, shape: tuple[int, int]) -> None:
    """A CPU computes the last few elements in memory in another way than the others."""
    assert _same_in_all(Behind(lambda x: getattr(x.t(), way)().sigmoid()), _inputs(shape))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_group_norm_behind_a_dry_run_is_computed_again(layout: torch.memory_format) -> None:
    norm = nn.GroupNorm(2, 8)
    model = Behind(norm)
    model.norm = norm
    nn.init.normal_(norm.weight)
    assert _same_in_all(model, [x.to(memory_format=layout) for x in _inputs((3, 8, 5, 7))])


class WrongEps(nn.LayerNorm):
    """Its forward uses another eps than its attribute says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-3)


@pytest.mark.parametrize("dry", [1, 2, 5])
def test_zeros_prove_no_eps(dry: int) -> None:
    model = Behind(WrongEps(32))
    model.norm = model.function
    _same_in_all(model, _inputs((16, 32), dry=dry))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.view(1, 16)


def test_a_view_of_a_weight_is_copied_as_the_weight_is() -> None:
    """Engines free a weight after its module's forward and gather it again only for that module's backward."""
    model = nn.Sequential(nn.Linear(16, 16), Scaled(), nn.SiLU())
    x = torch.randn(32, 16, requires_grad=True)
    with dh.save_activations(model, "", pipeline(dh.Recompute(), dh.OnCpu(), at_least=0)) as saving:
        y = model(x)
    assert "mul" in saving.report().recomputed_by
    storage, there = model[1].weight.untyped_storage(), model[1].weight.detach().clone()
    value = torch.nn.functional.linear(x, model[0].weight, model[0].bias) * there
    storage.resize_(0)
    assert torch.equal(y.grad_fn._saved_self, value)


def test_two_threads_that_prove_a_place_at_once_agree() -> None:
    """The second thread finds that its first attempt differs, when the other thread has proven the place already."""
    original, both = torch.arange(1024.0), threading.Barrier(2)
    place, found = Verification("here", always=False), []

    def attempt(way: int) -> torch.Tensor:
        if way == 0:
            both.wait(120)  # both threads ask before one of them has an answer
        return original + (1 - way)

    def ask() -> None:
        try:
            found.append(place.choose_variant(attempt, 2, original))
        except StoreError as error:
            found.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [1, 1]
    assert place.choose_variant(attempt, 2, original) == 1
    assert place.is_proven


class Named(torch.autograd.Function):
    """A user's Function with attributes that have the same names as those of torch's nodes."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.name, ctx.variable = "layer", nn.Parameter(x)
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_node_of_the_user_may_have_any_attributes(dtype: torch.dtype) -> None:
    model = Behind(lambda x: Named.apply(Named.apply(x).to(torch.float64)).relu())
    _same_in_all(model, _inputs((32, 32), dtype))


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ways that are tried, one after the other."""
    tried, attempted = [], verify._attempted

    def counts(attempt: Callable[[int], torch.Tensor], way: int, can_wait: bool) -> torch.Tensor | None:
        tried.append(way)
        return attempted(attempt, way, can_wait)

    monkeypatch.setattr(verify, "_attempted", counts)
    return tried


def _block(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin().sigmoid().sin().sum()


def test_a_block_in_a_loop_goes_on_with_its_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, x, compared = _counted(monkeypatch), torch.randn(64, 64, requires_grad=True), []
    for _ in range(8):
        with dh.saving(dh.Recompute(), dh.OnCpu(), at_least=0) as saved:
            loss = _block(x)
        assert saved.report().recomputed > 0
        loss.backward()
        compared.append(len(tried))
        tried.clear()
    assert compared[0] > 0
    assert compared == [compared[0] * (each.bit_count() == 1) for each in range(1, 9)]
    with dh.saving(dh.Recompute(), dh.OnCpu(), at_least=0):  # another line of code, of which nothing is known
        _block(x)
    assert len(tried) == compared[0]


def test_an_attachment_goes_on_with_the_proofs_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, compared = _counted(monkeypatch), []
    x, model = torch.randn(64, 64, requires_grad=True), Behind(torch.sigmoid)
    for step in range(4):
        attached = nn.DataParallel(model) if step % 2 else model  # the shell of an engine is not another model
        with dh.save_activations(attached, "", pipeline(dh.Recompute(), dh.OnCpu(), at_least=0)):
            model(x).backward()
        compared.append(len(tried))
        tried.clear()
    assert compared == [1, 1, 0, 1]
    other = Behind(torch.sigmoid)
    with dh.save_activations(other, "", pipeline(dh.Recompute(check="always"), dh.OnCpu(), at_least=0)):
        other(x).backward()
    assert len(tried) == 1


def test_proofs_go_with_the_code_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {"dh": dh}
    exec("def make():\n    return dh.saving(dh.Recompute(), dh.OnCpu(), at_least=0)", names)
    proofs = [names["make"]()._site.pipeline.proofs for _ in range(2)]  # type: ignore[operator]
    assert proofs[0] is proofs[1]
    alive = weakref.ref(proofs[0])
    del proofs
    assert alive() is not None
    names.clear()
    gc.collect()
    assert alive() is None
    monkeypatch.setattr(verify, "MOST_PLACES", 10)
    monkeypatch.setattr(verify, "MOST_OF_A_MODULE", 5)
    many = Proofs()
    often = many.verification(("here", "often"), "here", False)
    for number in range(100):
        many.verification(("here" if number % 2 else "there", number), "here", False)
        assert many.verification(("here", "often"), "here", False) is often  # what is used is not forgotten
    assert len(many._places) == 15
