"""Law 1, exact, for Recompute: what it computes again is, bit for bit, what it dropped.

Where the bits would differ, nothing is dropped.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from benchmarks.models import Bottleneck
from disthooks.saved.pipeline import pipeline
from disthooks.saved.recompute import formulas
from disthooks.saved.recompute.formulas import Call
from disthooks.saved.report import SavedReport
from disthooks.saved.stores.base import Store
from tests.support import gated, zoo
from tests.support.functions import SavesItsOutput
from tests.support.models import build, identical, step

STORES: dict[str, Callable[[object], object]] = {"disk": dh.OnDisk, "cpu": lambda _: dh.OnCpu()}


@dataclass(frozen=True)
class Holds(Store):
    """Holds the tensors that were put."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket.clone()

    def drop(self, ticket: torch.Tensor) -> None:
        pass


class RmsNorm(nn.Module):
    """As transformers writes it: in float32, back in the dtype that came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(width) + 0.5), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Gated(gated.Gated):
    """Half a Llama block: RMSNorm and SwiGLU, with a residual."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.norm = RmsNorm(width)


class Post(nn.Module):
    """As BERT's: GELU, dropout, a norm behind the sum."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(width, 128), nn.Linear(128, width), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.outer(F.gelu(self.inner(x))), 0.1, self.training)
        return self.norm(x + y)


def _images() -> torch.Tensor:
    return torch.randn(2, 32, 6, 6, generator=torch.Generator().manual_seed(0))


def _rows() -> torch.Tensor:
    return torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))


def _bottleneck() -> nn.Module:
    return Bottleneck(32, 8, 1)


def _blocks(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(kind(), kind(), kind())


def _bf16(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().bfloat16()


# How to make it, its input, and the least share of what would be stored that is computed again.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], float]] = {
    "resnet": (_blocks(_bottleneck), _images, 0.30),
    "resnet, eval": (lambda: _blocks(_bottleneck)().eval(), _images, 0.30),
    "resnet, channels last": (
        lambda: _blocks(_bottleneck)().to(memory_format=torch.channels_last),
        lambda: _images().contiguous(memory_format=torch.channels_last),
        0.30,
    ),
    "llama": (_blocks(Gated), _rows, 0.45),
    "llama in bfloat16": (_bf16(_blocks(Gated)), lambda: _rows().bfloat16(), 0.45),
    "bert": (_blocks(Post), _rows, 0.30),
    "transformer": (lambda: build("transformer")[0], lambda: build("transformer")[1], 0.30),
    "convolution": (lambda: build("convolution")[0], lambda: build("convolution")[1], 0.20),
}


def _stored(model: nn.Module, x: torch.Tensor, *stages: object, context: object = None) -> tuple[list, SavedReport]:
    """The gradients of two steps and what was stored."""
    with dh.save_activations(model, "", pipeline(*stages, at_least=0)) as saving:
        grads = [*step(model, x, context), *step(model, x, context)]
        gc.collect()
        return grads, saving.report()


@pytest.mark.first_tier(autocast=(False,), store=("disk",))
@pytest.mark.full_tier(store=("cpu",))
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_with_recompute_are_those_without_hooks(
    name: str, autocast: bool, store: str, tmp_path: pathlib.Path
) -> None:
    make, example, share = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), example()
    context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    truth = [*step(model, x, context), *step(model, x, context)]
    plain, without = _stored(model, x, dh.OnDisk(tmp_path), context=context)
    grads, report = _stored(model, x, dh.Recompute(), STORES[store](tmp_path), context=context)
    assert identical(grads, truth)
    assert identical(plain, truth)
    assert report.recomputed > share * without.stored * (0.6 if autocast else 1)
    assert report.stored + report.kept_by.get("in place", 0) <= without.stored - report.recomputed
    assert report.held == 0
    assert report.differed == {}


@pytest.mark.parametrize("store", [dh.OnDevice(), dh.OnCpu()], ids=["device", "cpu"])
def test_what_a_codec_leaves_alone_where_it_is_can_be_computed_from(store: object) -> None:
    model, x = _blocks(Gated)(), _rows()
    truth = [*step(model, x), *step(model, x)]
    _, without = _stored(model, x, dh.Recompute(), store)
    grads, report = _stored(model, x, dh.Recompute(), dh.Compact(), store)
    assert identical(grads, truth)
    assert report.recomputed == without.recomputed > 0.45 * (without.recomputed + without.stored)
    assert (report.moved, report.held) == (0, 0)


def test_the_report_says_when_recompute_found_nothing() -> None:
    model, x = _blocks(Gated)(), _rows()
    _, report = _stored(model, x, dh.Recompute(), dh.OnCpu())
    assert not any("Recompute" in advice for advice in report.advice())
    compiled = torch.compile(model, backend="aot_eager")
    _, found = _stored(compiled, x, dh.Recompute(), dh.OnCpu())
    assert found.recomputed == 0
    assert any("Recompute found nothing" in advice and "torch.compile" in advice for advice in found.advice())
    _, plain = _stored(model, x, dh.OnCpu())
    assert not any("Recompute" in advice for advice in plain.advice())


def test_an_upcast_copy_is_stored_narrow(tmp_path: pathlib.Path) -> None:
    w = torch.randn(64, 64).bfloat16().requires_grad_()

    def loss() -> torch.Tensor:
        return ((w * 2).to(torch.float32).sin() * 3).sum()  # sin saves the float32 copy

    (truth,) = torch.autograd.grad(loss(), w)
    with dh.saving(pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)) as saved:
        out = loss()
    (grad,) = torch.autograd.grad(out, w)
    assert torch.equal(grad, truth)
    assert saved.report().stored == 64 * 64 * 2
    assert saved.report().recomputed == 64 * 64 * 2


def _penalty(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return list(torch.autograd.grad(grad.square().sum(), list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("kind", [Gated, Post, _bottleneck])
def test_a_second_derivative_is_exact(kind: Callable[[], nn.Module], tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model, x = _blocks(kind)().eval(), _images() if kind is _bottleneck else _rows()
    truth = [g for g in _penalty(model, x) if g is not None]
    with dh.save_activations(model, "", pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)) as saving:
        found = [g for g in _penalty(model, x) if g is not None]
    assert identical(found, truth)
    assert saving.report().recomputed > 0


def test_the_number_of_threads_in_backward_does_not_matter(tmp_path: pathlib.Path) -> None:
    """A CPU computes the last elements of each thread's part another way."""
    before = torch.get_num_threads()
    x = (torch.randn(300_007) * 3).requires_grad_()
    with dh.saving(pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)) as saved:
        gate = x * 2
        y = F.silu(gate)
        z = y * y
    assert saved.report().recomputed == y.nbytes
    try:
        torch.set_num_threads(3 if before != 3 else 2)
        assert torch.equal(z.grad_fn._saved_self, y)
        assert torch.get_num_threads() == (3 if before != 3 else 2)
    finally:
        torch.set_num_threads(before)


def test_a_formula_that_is_wrong_drops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def wrong(node: formulas.NodeReader, find: object) -> Call:
        return Call("wrong", [node.operand(0, "self")], (lambda x: F.silu(x) + 1e-7, lambda x: x[0]))

    monkeypatch.setitem(formulas.FORMULAS, "SiluBackward0", wrong)
    model, x = Gated(), _rows()
    truth = [*step(model, x), *step(model, x)]
    with dh.save_activations(model, "", pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)) as saving:
        grads = [*step(model, x), *step(model, x)]
    report = saving.report()
    assert identical(grads, truth)
    assert sum(report.differed.values()) == 2 * x.numel() * 3 * 4  # silu(gate), in two steps
    assert any("wrong" in place for place in report.differed)
    assert "wrong" in "\n".join(report.advice())
    assert "mul" in report.recomputed_by


class Unseen(nn.Linear):
    """Multiplies a tensor that no node saved by ``factor``, which the graph does not show; 1 changes nothing."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(super().forward(x)).neg()
        with torch.no_grad():
            y *= self.factor
        return (y.sigmoid() @ self.weight).sum()


CODECS = pytest.mark.parametrize("codecs", [[], [dh.Quantize(8, stochastic=False)]], ids=["lossless", "lossy"])


@CODECS
def test_a_check_of_each_step_stores_what_the_graph_does_not_show(codecs: list[object], tmp_path: pathlib.Path) -> None:
    """The change does nothing at first, so the proof holds. A codec compares with the exact inputs."""
    model, x = Unseen(64, 64), torch.randn(64, 64, requires_grad=True)
    line = pipeline(dh.Recompute(check="always"), *codecs, dh.OnDisk(tmp_path), at_least=0)
    for step_number in range(6):
        model.factor = 1.0 if step_number < 3 else -1.0
        truth = torch.autograd.grad(model(x), [x, model.weight])
        with dh.save_activations(model, "", line) as saving:
            found = torch.autograd.grad(model(x), [x, model.weight])
        assert saving.report().recomputed > 0 or step_number >= 3
        assert bool(saving.report().differed) == (step_number >= 3)
        for grad, exact in zip(found, truth, strict=True):
            assert (grad - exact).norm() <= (0.05 if codecs else 0) * exact.norm()


@CODECS
@pytest.mark.parametrize("begins", [1, 3, 5])
def test_a_sampled_check_raises_at_what_the_graph_does_not_show(
    begins: int, codecs: list[object], tmp_path: pathlib.Path
) -> None:
    """A codec has the exact inputs when the comparison is due, so the next forward holds as many as it takes."""
    model, x = Unseen(64, 64), torch.randn(64, 64, requires_grad=True)
    line = pipeline(dh.Recompute(), *codecs, dh.OnDisk(tmp_path), at_least=0)
    saving = dh.save_activations(model, "", line)
    for _ in range(begins):
        model(x).backward()
    assert saving.report().recomputed > 0
    model.factor = -1.0
    until = (1 << begins.bit_length()) + 1  # the next power of two, or the step behind it
    with pytest.raises(dh.errors.StoreError, match="no_grad"):
        list(map(model, [x] * (until - begins)))


def test_a_source_changed_under_no_grad_is_no_source_for_a_place_that_is_trusted(tmp_path: pathlib.Path) -> None:
    """The store has the contents from before the change, and the graph does not show the change."""
    x = torch.randn(64, 64, requires_grad=True)

    def loss(factor: float) -> torch.Tensor:
        y = x * 1.0
        other = y.detach().requires_grad_().sin()  # saves something, so the contents of all tensors before it are taken
        z = y.sin()
        other = other + z.exp()
        with torch.no_grad():
            y.mul_(factor)
        return y.relu().square().sum() + 0 * other.detach().sum()

    factors = [1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 3.0]
    truth = [torch.autograd.grad(loss(factor), x)[0] for factor in factors]
    for factor, right in zip(factors, truth, strict=True):
        with dh.saving(pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)):
            found = loss(factor)
        assert torch.equal(torch.autograd.grad(found, x)[0], right), factor


@pytest.mark.parametrize("kind", [*STORES, "as it is"])
def test_what_is_computed_from_memory_that_was_written_without_a_count_is_stored(
    kind: str, tmp_path: pathlib.Path
) -> None:
    """The source was stored before it was written, its tensor is gone, and others still hold its memory."""
    store = Holds() if kind == "as it is" else STORES[kind](tmp_path)
    with dh.saving(dh.Recompute(), store):
        y = torch.randn(64, 64, requires_grad=True) * 2
        y.sin()  # saves y as it is now
        others = y.data
        others.fill_(0.5)
        z = y.exp()
        del y
        output = z.cos()
        output.cos().cos()  # later operators, which decide about z
    assert torch.equal(output.grad_fn._saved_self, torch.full((64, 64), 0.5).exp())


def test_a_source_that_is_changed_later_raises(tmp_path: pathlib.Path) -> None:
    for store in (dh.OnDevice("1 GiB"), dh.OnDisk(tmp_path)):
        x = torch.randn(64, 64, requires_grad=True)
        with dh.saving(pipeline(dh.Recompute(), store, at_least=0)) as saved:
            gate = x * 2
            y = F.silu(gate)
            z = (y * y).sum()
        assert saved.report().recomputed == y.nbytes
        with torch.no_grad():
            gate.add_(1)
        with pytest.raises(dh.errors.MutationError):
            z.backward()


def test_a_weight_stepped_on_before_backward_does_not_matter(tmp_path: pathlib.Path) -> None:
    norm, x = nn.LayerNorm(64), torch.randn(32, 64, requires_grad=True)
    model = nn.Sequential(norm, nn.Linear(64, 8))
    with dh.save_activations(model, "", pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)) as saving:
        out = model(x).sum()
    assert saving.report().recomputed_by == {"layer_norm": x.nbytes}
    normed = norm(x).detach()
    norm.weight.data.mul_(3)
    (grad,) = torch.autograd.grad(out, model[1].weight)
    assert torch.equal(grad, torch.ones(32, 8).t() @ normed)


def test_an_eps_that_nobody_knows_is_not_guessed(tmp_path: pathlib.Path) -> None:
    x = torch.randn(32, 64, requires_grad=True)
    weight = torch.ones(64, requires_grad=True)
    with dh.saving(pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)) as saved:
        F.layer_norm(x * 2, (64,), weight, eps=1e-3).sigmoid().sin().sum().backward()
    assert "layer_norm" not in str(saved.report().recomputed_by)


def test_the_number_of_steps_is_bounded(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    for steps, dropped in ((1, 5), (2, 6), (10, 9)):
        with dh.saving(pipeline(dh.Recompute(steps), dh.OnDisk(tmp_path), at_least=0)) as saved:
            y = (x * 2).sin()
            z = (y + 0 * y).sin()  # saves a tensor that one sum and one product compute
            for _ in range(9):
                z = z.sigmoid()
        assert saved.report().recomputed <= dropped * x.nbytes
        z.sum().backward()


@pytest.mark.parametrize("codec", [dh.Quantize(8), dh.Cast(torch.bfloat16)], ids=repr)
def test_with_a_lossy_codec_the_proof_is_about_the_exact_inputs(codec: object, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model, x = Gated(64), torch.randn(4, 64, 64)
    _, without = _stored(model, x, codec, dh.OnDisk(tmp_path))
    grads, report = _stored(model, x, dh.Recompute(), codec, dh.OnDisk(tmp_path))
    truth = [*step(model, x), *step(model, x)]
    assert report.recomputed > 0
    assert report.stored < without.stored
    for grad, exact in zip(grads, truth, strict=True):
        assert (grad - exact).norm() < 0.1 * exact.norm()


def test_wrong_arguments_are_refused() -> None:
    for arguments in ({"steps": 0}, {"steps": True}, {"check": "never"}):
        with pytest.raises(dh.errors.UsageError):
            dh.Recompute(**arguments)  # type: ignore[arg-type]
    with pytest.raises(dh.errors.UsageError, match="Functions"):
        pipeline(dh.Recompute(), dh.Functions(lambda t: t, lambda t: t))
    with pytest.raises(dh.errors.UsageError, match="out of place"):
        pipeline(dh.Quantize(8), dh.Recompute(), dh.OnCpu())


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("name", "pattern", "share"),
    [("llama", "model.layers.*", 0.4), ("bert", "bert.encoder.layer.*", 0.2), ("gpt2", "transformer.h.*", 0.2)],
)
def test_models_of_transformers_are_exact(name: str, pattern: str, share: float, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    model, inputs = zoo.build(name)

    def grads() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(**inputs).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    truth = grads()
    with dh.save_activations(model, pattern, pipeline(dh.OnDisk(tmp_path), at_least=0)) as saving:
        assert identical(grads(), truth)
        without = saving.report()
    with dh.save_activations(model, pattern, pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)) as saving:
        assert identical(grads(), truth)
        assert identical(grads(), truth)
        report = saving.report()
    assert report.recomputed > 2 * share * without.stored
    assert report.held == 0
    assert report.differed == {}


def test_a_checkpoint_inside_is_exact(tmp_path: pathlib.Path) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    block, outer = Gated(), Gated()
    x = _rows().requires_grad_()

    def loss() -> torch.Tensor:
        return checkpoint(block, outer(F.silu(x * 2)), use_reentrant=False).square().sum()

    weights = [*block.parameters(), *outer.parameters(), x]
    truth = torch.autograd.grad(loss(), weights)
    with dh.saving(pipeline(dh.Recompute(), dh.OnDisk(tmp_path), at_least=0)) as saved:
        found = loss()
    assert identical(list(torch.autograd.grad(found, weights)), list(truth))
    assert saved.report().recomputed > 0


class Token:
    """Lives as long as the node whose metadata it is put into."""


SELF_SAVING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a Function": SavesItsOutput.apply,
    "tanh": torch.tanh,
    "in place": lambda x: (x * 2).relu_(),
    "softmax": lambda x: torch.softmax(x, -1),
    "two": lambda x: torch.tanh(torch.exp(x * 2).sin()),
    "behind a Function": lambda x: torch.exp(SavesItsOutput.apply(x).view(-1)),
}


@pytest.mark.parametrize("is_cycle", [False, True])
@pytest.mark.parametrize("codecs", [[], [dh.Quantize(8)]], ids=["lossless", "lossy"])
@pytest.mark.parametrize("name", SELF_SAVING)
def test_a_graph_that_is_dropped_in_an_open_block_goes_at_once(name: str, codecs: list[object], is_cycle: bool) -> None:
    """Nothing of ours holds a node that saved its own output, even while its contents are not taken yet.

    A cycle that the user made goes with the collector.
    """
    x = torch.randn(64, 64, requires_grad=True)
    gc.disable()
    try:
        with dh.saving(pipeline(dh.Recompute(), *codecs, dh.OnCpu(), at_least=0)):
            y = SELF_SAVING[name](x)
            token = Token()
            y.grad_fn.metadata["token"] = token
            alive = weakref.ref(token)
            if is_cycle:
                y.itself = y  # type: ignore[attr-defined]
            del token, y
            if is_cycle:
                gc.collect()
            assert alive() is None
    finally:
        gc.enable()


def _named(x: torch.Tensor) -> torch.Tensor:
    h = SavesItsOutput.apply(x)
    a = -h
    z = torch.tanh(a.sin())
    h += x
    return z.sum() + h.sum()


def _temporary(x: torch.Tensor) -> torch.Tensor:
    """Only the store has what ``sin`` saved when ``tanh`` is proven from it, still in forward."""
    h = SavesItsOutput.apply(x)
    z = torch.tanh((-h).sin())
    h += x
    return (z * z).sum() + h.sum()


def _before_it_is_proven(x: torch.Tensor) -> torch.Tensor:
    h = SavesItsOutput.apply(x)
    y = (-h).sin()
    h += x
    return y.tanh().exp().sum() + h.sum()


def _a_branch_that_nobody_wants(x: torch.Tensor) -> torch.Tensor:
    h = (x * 2).view(64, 64)
    log = h.sin()
    z = torch.tanh((-h).cos())
    h += x
    return z.sum() + h.sum() + 0 * log.detach().sum()


CHANGED = [_named, _temporary, _before_it_is_proven, _a_branch_that_nobody_wants]
OWN: dict[str, Callable[[object], list[object]]] = {
    "disk": lambda folder: [dh.OnDisk(folder)],
    "disk, compact": lambda folder: [dh.Compact(), dh.OnDisk(folder)],
    "tiers": lambda folder: [dh.Tiered(dh.OnDevice("1 KiB"), dh.OnDisk(folder))],
}


def _gradients(function: Callable[[torch.Tensor], torch.Tensor], *stages: object) -> Iterator[torch.Tensor]:
    """The gradients of six steps; Recompute compares its result with the original in some of them."""
    for seed in range(6):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with dh.saving(*stages, at_least=0) if stages else contextlib.nullcontext():
            loss = function(x)
        yield torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("store", OWN)
@pytest.mark.parametrize("function", CHANGED, ids=lambda each: each.__name__.strip("_"))
def test_a_source_that_the_store_has_may_be_changed(
    function: Callable[[torch.Tensor], torch.Tensor], store: str, tmp_path: pathlib.Path
) -> None:
    truth = list(_gradients(function))
    assert identical(list(_gradients(function, dh.Recompute(), *OWN[store](tmp_path))), truth)


@pytest.mark.parametrize("function", CHANGED, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("store", [dh.OnCpu(), dh.OnDevice("1 GiB")], ids=["cpu", "device"])
def test_a_source_that_was_changed_where_it_is_raises(
    store: object, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A store in memory may hold the tensor itself. Its old bytes are gone then, and the error says what to do."""
    try:
        found: object = next(_gradients(function, dh.Recompute(), store))
    except dh.errors.MutationError as error:
        found = str(error)
    right = next(_gradients(function))
    said = isinstance(found, str) and "Recompute computes another tensor from it" in found
    assert said or (isinstance(found, torch.Tensor) and torch.equal(found, right))


class Gate(nn.Module):
    """A large tensor is computed from one that stays in memory, and which nobody else saves."""

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (x.sin() * factor).sigmoid().sum()


@pytest.mark.parametrize(("rows", "error"), [(16, None), (256, dh.errors.MutationError)], ids=["small", "large"])
def test_a_source_in_memory_that_is_written_without_a_count_gives_no_wrong_gradient(
    rows: int, error: type[Exception] | None
) -> None:
    """A small source was copied, and of a large one there is a checksum."""
    torch.manual_seed(0)
    model, x, factor = Gate(), torch.randn(rows, 256, requires_grad=True), torch.randn(rows, 256)
    y = x.detach().sin() * factor  # what is saved for sigmoid; the product's backward reads `factor` as it is then
    truth = torch.ops.aten.sigmoid_backward(torch.ones_like(y), y.sigmoid()) * (factor * 2) * x.detach().cos()
    with dh.save_activations(model, "", pipeline(dh.Recompute(), dh.OnDevice("1 GiB"), at_least=0)) as saving:
        for _ in range(3):
            torch.autograd.grad(model(x, factor), x)
        loss = model(x, factor)
        assert any("mul" in how for how in saving.report().recomputed_by)
        factor.data.mul_(2)
        with pytest.raises(error, match="without a new version") if error else contextlib.nullcontext():
            (found,) = torch.autograd.grad(loss, x)
    if error is None:
        assert torch.equal(found, truth)


@pytest.mark.parametrize("store", ["disk", "device"])
def test_an_output_that_was_saved_and_then_written_without_a_count_is_stored(
    store: str, tmp_path: pathlib.Path
) -> None:
    """The node of the output says how it was before the write, and the place is trusted, so nothing is compared."""
    writes = [False]

    class Written(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.sin().tanh()  # saves its output
            if writes[0]:
                y.data.mul_(0.5)
            return y.sin().sum()  # saves it as it is now

    model, x = Written(), torch.randn(64, 64, requires_grad=True)

    def grad() -> torch.Tensor:
        return torch.autograd.grad(model(x), x)[0]

    truth = []
    for written in (False, True):
        writes[0] = written
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            truth.append(grad())
    line = pipeline(dh.Recompute(), dh.OnDisk(tmp_path) if store == "disk" else dh.OnDevice("1 GiB"), at_least=0)
    with dh.save_activations(model, "", line) as saving:
        for step_number in range(1, 8):
            writes[0] = step_number in (3, 6)  # steps in which nothing would be compared
            assert torch.equal(grad(), truth[writes[0]]), step_number
    assert saving.report().recomputed > 0
