"""Operations and bytes of operators, against closed formulas and torch's own counter, and what follows in seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from disthooks.predict.hardware.devices import device_named
from disthooks.predict.hardware.roofline import HOST_CALL, phase_seconds, seconds_of
from disthooks.predict.recording.costs import Cost, cost, may_use_tf32
from disthooks.predict.recording.record import Operator

aten = torch.ops.aten


class Costs(TorchDispatchMode):
    """The cost of each operator that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Cost]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found.append((func, cost(func, args, kwargs or {}, out)))
        return out

    def flops(self) -> int:
        return sum(each.flops for _, each in self.found)

    def of(self, operator: Any) -> Cost:
        """The sum over the calls of one operator, by its packet."""
        return added(each for func, each in self.found if func.overloadpacket is operator)


def added(costs: Iterable[Cost]) -> Cost:
    """All in one, without the dtype."""
    flops, read, written = (sum(column) for column in zip(*(each[:3] for each in costs), strict=True))
    return Cost(flops, read, written)


# -- closed formulas

X, Y, ROW = torch.empty(64, 32, device="meta"), torch.empty(64, 32, device="meta"), torch.empty(32, device="meta")
WHOLE = X.nbytes
TABLE, AT = torch.empty(50_000, 64, device="meta"), torch.empty(10, dtype=torch.int64, device="meta")
ROWS = 10 * 64 * 4
#: What runs, and its operations, the bytes that it reads and those that it writes.
COSTS: dict[str, tuple[Callable[[], Any], tuple[int, int, int]]] = {
    "a product": (lambda: X @ Y.t(), (2 * 64 * 32 * 64, 2 * WHOLE, 64 * 64 * 4)),
    "a product and a sum": (lambda: torch.addmm(ROW, X, X[:32]), (2 * 64 * 32 * 32, WHOLE + WHOLE // 2 + 128, WHOLE)),
    "products": (lambda: torch.bmm(X[None], Y.t()[None]), (2 * 64 * 32 * 64, 2 * WHOLE, 64 * 64 * 4)),
    "a sum": (lambda: X + Y, (0, 2 * WHOLE, WHOLE)),
    "a sum with a row": (lambda: X + ROW, (0, WHOLE + 128, WHOLE)),
    "a sum with an expanded row": (lambda: X + ROW.expand(64, 32), (0, WHOLE + 128, WHOLE)),
    "a reshape that copies": (lambda: X + X.t().reshape(64, 32), (0, 3 * WHOLE, 2 * WHOLE)),
    "a cast": (lambda: X.to(torch.bfloat16), (0, WHOLE, WHOLE // 2)),
    "a reduction": (lambda: X.sum(), (0, WHOLE, 4)),
    "in place": (lambda: X.add_(Y), (0, 2 * WHOLE, WHOLE)),
    "in place, a number": (lambda: X.add_(1), (0, WHOLE, WHOLE)),
    "lists": (lambda: torch._foreach_add_([X, Y], 1.0), (0, 2 * WHOLE, 2 * WHOLE)),
    "views": (lambda: (X.t(), X.detach(), X.unbind(), X.view(-1), X[2:4, ::2], X.expand(3, 64, 32)), (0, 0, 0)),
    "memory alone": (lambda: (torch.empty_like(X), X.new_empty(7)), (0, 0, 0)),
    "an embedding": (lambda: nn.functional.embedding(AT, TABLE), (0, ROWS + 80, ROWS)),
    "rows of a table": (lambda: TABLE[AT], (0, ROWS + 80, ROWS)),
    "sums of rows": (lambda: TABLE.index_add_(0, AT, TABLE[:10]), (0, 2 * (ROWS + 80), ROWS + 80)),
}


@pytest.mark.parametrize("name", COSTS)
def test_operations_and_bytes_of_an_operator(name: str) -> None:
    run, wanted = COSTS[name]
    with Costs() as costs:
        run()
    assert added(each for _, each in costs.found)[:3] == wanted


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (4, 1), (8, 2), (1, 2)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_and_its_backward(groups: int, stride: int, transposed: bool) -> None:
    shape = (8, 16 // groups, 3, 3) if transposed else (16, 8 // groups, 3, 3)
    x, w = torch.randn(2, 8, 12, 12, requires_grad=True), torch.randn(*shape, requires_grad=True)
    with Costs() as costs, FlopCounterMode(display=False) as counter:
        if transposed:
            y = torch.conv_transpose2d(x, w, padding=1, stride=stride, groups=groups)
        else:
            y = torch.conv2d(x, w, padding=1, stride=stride, groups=groups)
        y.sum().backward()
    products = 2 * (x.numel() if transposed else y.numel()) * shape[1] * 9
    forward, backward = costs.of(aten.convolution), costs.of(aten.convolution_backward)
    assert forward == Cost(products, 4 * (x.numel() + w.numel()), 4 * y.numel())
    assert backward == Cost(2 * products, 4 * (x.numel() + w.numel() + 1), 4 * (x.numel() + w.numel()))
    if groups == 1:  # torch's own counter counts the weight's gradient as if nothing was grouped
        assert counter.get_total_flops() == 3 * products


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_products_of_groups() -> None:
    for first, second, out, flops in (
        (meta(64, 32), meta(4, 32, 48), meta(64, 48), 2 * 64 * 32 * 48),
        (meta(32, 64), meta(64, 48), meta(4, 32, 48), 2 * 64 * 32 * 48),  # the gradient of the weight
        (meta(4, 5, 32), meta(4, 32, 48), meta(4, 5, 48), 2 * 4 * 5 * 32 * 48),
    ):
        assert cost(aten._grouped_mm.default, (first, second, meta(4)), {}, out).flops == flops


@pytest.mark.parametrize("ways", [1, 2])
def test_a_fused_lstm_of_cudnn(ways: int) -> None:
    t, b, i, h, layers = 7, 3, 10, 12, 2
    inputs = [i if layer == 0 else ways * h for layer in range(layers) for _ in range(ways)]
    weights = [each for n in inputs for each in (meta(4 * h, n), meta(4 * h, h), meta(4 * h), meta(4 * h))]
    state = meta(layers * ways, b, h)
    options = (2, h, 0, layers, False, 0.0, True, ways == 2, [], None)
    out = (meta(t, b, ways * h), state, state, meta(1), meta(1))
    found = cost(aten._cudnn_rnn.default, (meta(t, b, i), weights, 4, None, state, state, *options), {}, out)
    assert found.flops == sum(2 * t * b * 4 * h * (n + h) for n in inputs)


# -- torch's own counter


class Mixed(nn.Module):
    """Convolution, norm, transposed convolution, attention, LSTM cell, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.cell = nn.LSTMCell(16, 16)
        self.table = nn.Embedding(10, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.up(torch.relu(self.norm(self.conv(image)))).flatten(2)[..., :16]
        x = self.attention(x) + self.table(torch.arange(8))
        hidden, _ = self.cell(x[:, 0])
        return self.head(hidden)


def step(model: nn.Module, image: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(image).logsumexp(-1).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("is_fake", [False, True])
def test_flops_of_a_training_step_are_those_of_torchs_counter(is_fake: bool) -> None:
    with FakeTensorMode() if is_fake else torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH):
        model, image = Mixed(), torch.randn(2, 3, 8, 8)
        with FlopCounterMode(display=False) as counter:
            step(model, image)
        with Costs() as costs:
            step(model, image)
    assert counter.get_total_flops() == costs.flops() > 100_000


# -- seconds


def test_the_longer_of_computing_and_moving_counts_and_small_operators_take_the_hosts_time() -> None:
    device = dataclasses.replace(
        device_named("a100"), bf16=100e12, fp32=10e12, tf32=50e12, fp16=None, fp8=None, bandwidth=1e12,
        matmul_efficiency=0.5, memory_efficiency=0.8,
    )  # fmt: skip
    # There are no units for float16: as float32.
    by_dtype = {"bfloat16": 0.02, "float32": 0.2, "tf32": 0.04, "float64": 0.4, "float16": 0.2, "float8_e4m3fn": 0.2}
    found = {dtype: seconds_of(Cost(10**12, 10**9, 0, dtype), device) for dtype in by_dtype}
    assert found == pytest.approx(by_dtype)
    assert seconds_of(Cost(10**6, 3 * 10**9, 10**9, "bfloat16"), device) == pytest.approx(0.005)
    long = Operator("aten.mm", "forward", 0, flops=10**15, dtype="bfloat16")
    short = Operator("aten.add", "backward", 0, read=512, written=512)
    assert phase_seconds([long, *[short] * 1000], device) == pytest.approx(
        {"forward": seconds_of(long, device), "backward": 1000 * HOST_CALL}
    )


def test_tf32_follows_torchs_settings() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    allowed: Any = getattr(torch.backends, "__allow_nonbracketed_mutation")
    with allowed():
        try:
            for flag in (True, False):
                torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = flag, not flag
                assert may_use_tf32(aten.convolution_backward) is flag
                assert may_use_tf32(aten.addmm) is not flag
        finally:
            torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
