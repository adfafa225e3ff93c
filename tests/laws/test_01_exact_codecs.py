"""Law 1, exact, for codecs: lossless codecs change no gradient.

Lossy codecs change no index and no mask, training converges with them, and the report says how much they lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks.saved.codecs import Codec
from disthooks.saved.pipeline import pipeline
from tests.support.models import CASES, build, identical, step

STORES = {"disk": dh.OnDisk, "cpu": lambda folder: dh.OnCpu()}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("model", CASES)
def test_lossless_codecs_give_the_same_bits(model: str, store: str, tmp_path: pathlib.Path) -> None:
    net, x = build(model)
    truth = step(net, x)
    saved = dh.saving(dh.Compact(), STORES[store](tmp_path), at_least=0)
    assert identical(step(net, x, saved), truth)
    report = saved.report()
    assert report.stored + report.kept_by.get("in place", 0) > 50_000  # Compact and OnCpu may leave all of it
    assert report.held == 0
    assert report.errors == {}


class Indexed(nn.Module):
    """Embedding, max pooling and gather, whose backward needs indices alone; and an exponential, which is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rounded = nn.Embedding(50, 32), nn.Parameter(torch.randn(256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).transpose(1, 2)
        pooled = F.max_pool1d(x, 2).transpose(1, 2)
        order = torch.argsort(pooled.detach(), dim=-1)
        return pooled.gather(-1, order)[..., ::2].sum() + self.rounded.exp().sum()


@pytest.mark.parametrize(
    "codec", [dh.Quantize(8), dh.Quantize(4), dh.Cast(torch.float8_e4m3fn), dh.Cast(torch.float16)]
)
def test_gradients_that_need_indices_alone_are_the_same_bits(codec: Codec, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    net, tokens = Indexed(), torch.randint(0, 50, (8, 64))
    truth = torch.autograd.grad(net(tokens), [net.embed.weight, net.rounded])
    with dh.saving(codec, dh.OnDisk(tmp_path), at_least=0) as saved:
        loss = net(tokens)
    got = torch.autograd.grad(loss, [net.embed.weight, net.rounded])
    assert torch.equal(got[0], truth[0])
    assert not torch.equal(got[1], truth[1])
    assert saved.report().stored >= 2 * tokens.nbytes  # the tokens, and the indices of the pooling and of the gather


def test_a_relu_takes_for_zero_what_was_rounded_to_zero(tmp_path: pathlib.Path) -> None:
    """The backward of ReLU asks whether its output is positive.

    A lossy codec that rounds a small output to zero drops its gradient; docs/saved-tensors/codecs.md states this limit.
    """
    x = torch.randn(128, 128, requires_grad=True)
    with dh.saving(dh.Quantize(8), dh.OnDisk(tmp_path)):
        y = torch.relu(x)
    y.sum().backward()
    step_of = y.detach().amax(1, keepdim=True) / 127
    differs = x.grad != (x > 0)
    assert differs.any()
    assert (x[differs] < step_of.expand_as(x)[differs]).all()
    assert (x[differs] > 0).all()


def trained(context: dh.saving | None, steps: int = 150) -> tuple[float, float]:
    """The first and the last loss of a small classifier with dropout."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 4))
    x = torch.randn(256, 16)
    y = (x[:, :2] > 0).long() @ torch.tensor([1, 2])
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        with context or contextlib.nullcontext():
            loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], sum(losses[-10:]) / 10


@pytest.mark.parametrize(
    ("codec", "off"), [(dh.Quantize(8), 0.02), (dh.Cast(torch.float8_e4m3fn), 0.02), (dh.Quantize(4), 0.3)]
)
def test_training_converges_as_without_codecs(codec: Codec, off: float, tmp_path: pathlib.Path) -> None:
    threads = torch.get_num_threads()
    try:
        first, last = trained(None)
        begin, end = trained(dh.saving(codec, dh.OnDisk(tmp_path)))
    finally:
        torch.set_num_threads(threads)
    assert last < 0.1 * first
    assert begin == first  # the first loss is of the forward alone: the same weights and dropout masks
    assert end == pytest.approx(last, abs=off)
    assert end != last


@pytest.mark.parametrize(
    ("codec", "ratio"),
    [
        (lambda: dh.Quantize(8), 4 / (1 + 4 / 128)),
        (lambda: dh.Quantize(4), 4 / (0.5 + 4 / 128)),
        (lambda: dh.Cast(torch.float8_e5m2), 4 / (1 + 4 / 128)),
        (lambda: dh.Compact(), 1 / (0.5 + 1 / 32)),
    ],
)
def test_what_is_stored_is_smaller(codec: object, ratio: float, tmp_path: pathlib.Path) -> None:
    x = torch.randn(256, 256, requires_grad=True)

    def work() -> torch.Tensor:
        return torch.relu(x).square().sum()

    sizes = []
    for codecs in ((), (codec(),)):
        with dh.saving(*codecs, dh.OnDisk(tmp_path)) as saved:
            loss = work()
        sizes.append(saved.report().stored)
        assert saved.report().held == saved.report().stored
        loss.backward()
        assert saved.report().held == 0
    assert sizes[0] == x.nbytes
    assert sizes[0] / sizes[1] == pytest.approx(ratio, rel=0.02)


def test_errors_are_reported_and_right(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with dh.saving(dh.Quantize(8, stochastic=False), dh.OnDisk(tmp_path)) as saved:
        y = x.exp()
    codec, error = next(iter(saved.report().errors.items()))
    assert codec == "Quantize(bits=8, block=128, stochastic=False)"
    y.sum().backward()
    # The gradient of exp is what was saved.
    seen = float((x.grad - y.detach()).norm() / y.detach().norm())
    assert error == pytest.approx(seen, rel=1e-5)
    assert 1e-3 < error < 2e-2
    assert f"{codec} {error:.2g}" in str(saved.report())


@pytest.mark.parametrize("order", [1, -1])
def test_the_report_keeps_the_largest_error(order: int, tmp_path: pathlib.Path) -> None:
    exact, rounded = torch.zeros(4096, requires_grad=True), torch.randn(4096, requires_grad=True)
    with dh.saving(dh.Quantize(8), dh.OnDisk(tmp_path)) as saved:
        kept = [x.exp() for x in (exact, rounded)[::order]]
    assert len(kept) == 2
    assert 1e-3 < saved.report().errors[repr(dh.Quantize(8))] < 0.1
    assert saved.report() == saved.report()


@dataclasses.dataclass(frozen=True)
class Counted(Codec):
    """Half the precision, and how often it was decoded."""

    decoded: list = dataclasses.field(default_factory=list, compare=False, repr=False)

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], None]:
        return (tensor.half(),), None

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: None) -> torch.Tensor:
        self.decoded.append(1)
        return tensors[0].float()


class Lossy(Counted):
    lossy = True


@pytest.mark.parametrize(("kind", "measured"), [(Counted, 0), (Lossy, 7)])
def test_a_sample_is_measured_of_codecs_that_say_so(kind: type, measured: int, tmp_path: pathlib.Path) -> None:
    """Of 100 tensors the 1st, 2nd, 4th and so on up to the 64th are measured.

    A codec that does not say that it is lossy is not measured.
    """
    codec = kind()
    x = torch.randn(8, requires_grad=True)
    with dh.saving(codec, dh.OnDisk(tmp_path), at_least=0) as saved:
        ys = [x.exp() for _ in range(100)]
    assert len(codec.decoded) == measured
    assert list(saved.report().errors) == ([repr(codec)] if measured else [])
    torch.stack(ys).sum().backward()
    assert len(codec.decoded) == measured + 100


@pytest.mark.parametrize("codec", [dh.Quantize(8), dh.Compact(), dh.Cast(torch.float8_e5m2)])
def test_a_retained_graph_is_rounded_once(codec: Codec, tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    function = torch.relu if codec == dh.Compact() else torch.sigmoid
    (truth,) = torch.autograd.grad(function(x).exp().sum(), x)
    with dh.saving(codec, dh.OnDisk(tmp_path)) as saved:
        y = function(x).exp().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    second = torch.autograd.grad(y, x)[0]
    assert torch.equal(first, second)  # rounded once, when it was stored
    assert torch.linalg.vector_norm(first - truth) <= (0.1 if codec.lossy else 0) * torch.linalg.vector_norm(truth)
    assert saved.report().held == 0


def test_double_backward_goes_through_codecs(tmp_path: pathlib.Path) -> None:
    x = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    saved = dh.saving(dh.Compact(), dh.OnDisk(tmp_path), at_least=0)

    @saved
    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x).exp() @ x.sin()).square()

    assert torch.autograd.gradcheck(f, (x,))
    assert torch.autograd.gradgradcheck(f, (x,))

    line = pipeline(dh.Quantize(8, stochastic=False), dh.OnDisk(tmp_path), at_least=0)
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    with dh.saving(line) as lossy:
        (first,) = torch.autograd.grad(x.sin().square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.linalg.vector_norm(second - 2 * (2 * x).cos()) < 0.05 * torch.linalg.vector_norm(second)
    assert lossy.report().errors


def test_layouts_come_back_from_codecs(tmp_path: pathlib.Path) -> None:
    """Channels last, a part of a storage, and a transposed part come back with the strides that they had."""
    for make in (
        lambda: torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(100, 70)[:20, ::2],
        lambda: torch.randn(50, 40).t()[3:30],
    ):
        for codec in (dh.Compact(), dh.Quantize(8)):
            x = torch.relu(make()).requires_grad_()
            with dh.saving(codec, dh.OnDisk(tmp_path), at_least=0):
                node = x.square().grad_fn
            back = node._saved_self
            assert (back.shape, back.stride()) == (x.shape, x.stride())
            torch.testing.assert_close(back, x, rtol=0.05, atol=0.05)
