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
from disthooks.predict.recording.recorder import Recorder

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


def cost_of(run: Callable[..., Any], *args: Any) -> Cost:
    """The cost of the operators of ``run``, all in one."""
    with Costs() as costs:
        run(*args)
    return added(each for _, each in costs.found)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# -- closed formulas


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_matrices(dtype: torch.dtype) -> None:
    m, k, n, b, size = 96, 160, 224, 3, dtype.itemsize
    a, c, bias = meta(m, k, dtype=dtype), meta(k, n, dtype=dtype), meta(n, dtype=dtype)
    assert cost_of(torch.mm, a, c) == Cost(2 * m * k * n, (m * k + k * n) * size, m * n * size)
    assert cost_of(torch.addmm, bias, a, c) == Cost(2 * m * k * n, (m * k + k * n + n) * size, m * n * size)
    batch = meta(b, m, k, dtype=dtype), meta(b, k, n, dtype=dtype)
    assert cost_of(torch.bmm, *batch) == Cost(2 * b * m * k * n, b * (m * k + k * n) * size, b * m * n * size)


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


def test_a_convolution_whose_input_needs_no_gradient() -> None:
    x, w = torch.randn(2, 8, 12, 12), torch.randn(16, 8, 3, 3, requires_grad=True)
    with Costs() as costs:
        torch.conv2d(x, w).sum().backward()
    assert costs.of(aten.convolution_backward).flops == costs.of(aten.convolution).flops


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_fused_lstm_of_cudnn(layers: int, bidirectional: bool) -> None:
    t, b, i, h, ways = 7, 3, 10, 12, 2 if bidirectional else 1
    weights = []
    for layer in range(layers):
        for _ in range(ways):
            weights += [meta(4 * h, i if layer == 0 else ways * h), meta(4 * h, h), meta(4 * h), meta(4 * h)]
    state = meta(layers * ways, b, h)
    arguments = [
        meta(t, b, i),
        weights,
        4,
        None,
        state,
        state,
        2,
        h,
        0,
        layers,
        False,
        0.0,
        True,
        bidirectional,
        [],
        None,
    ]
    out = (meta(t, b, ways * h), state, state, meta(1), meta(1))
    found = cost(aten._cudnn_rnn.default, arguments, {}, out)
    by_hand = sum(2 * t * b * 4 * h * ((i if layer == 0 else ways * h) + h) * ways for layer in range(layers))
    assert found.flops == by_hand


def test_products_of_groups() -> None:
    groups, rows, k, n = 4, 64, 32, 48
    tokens, experts = meta(rows, k), meta(groups, k, n)
    found = cost(aten._grouped_mm.default, (tokens, experts, meta(groups)), {}, meta(rows, n))
    assert found.flops == 2 * rows * k * n
    weight_gradient = cost(aten._grouped_mm.default, (meta(k, rows), meta(rows, n)), {}, meta(groups, k, n))
    assert weight_gradient.flops == 2 * rows * k * n
    assert cost(aten._grouped_mm.default, (meta(groups, 5, k), experts), {}, meta(groups, 5, n)).flops == 40 * k * n


# -- bytes


def test_elementwise_operators_read_inputs_and_write_outputs() -> None:
    x, y, row = meta(64, 32), meta(64, 32), meta(32)
    whole = 64 * 32 * 4
    assert cost_of(torch.add, x, y) == Cost(0, 2 * whole, whole)
    assert cost_of(torch.add, x, row) == Cost(0, whole + 128, whole)
    assert cost_of(lambda: x + x.t().reshape(64, 32)) == Cost(0, 3 * whole, 2 * whole)  # reshape copies
    assert cost_of(torch.add, x, row.expand(64, 32)) == Cost(0, whole + 128, whole)  # expand reads one row
    assert cost_of(lambda a: a.to(torch.bfloat16), x) == Cost(0, whole, whole // 2)
    assert cost_of(torch.sum, x) == Cost(0, whole, 4)


def test_in_place_operators_write_what_they_read() -> None:
    x, y = meta(1000), meta(1000)
    assert cost_of(x.add_, y) == Cost(0, 8000, 4000)
    assert cost_of(x.add_, 1) == Cost(0, 4000, 4000)
    assert cost_of(torch._foreach_add_, [x, y], 1.0) == Cost(0, 8000, 8000)
    assert cost_of(torch._foreach_mul, [x, y], [y, y]) == Cost(0, 16000, 8000)


def test_views_and_empty_memory_are_free() -> None:
    x, free = torch.randn(8, 6), Cost(0, 0, 0)
    views = (x.t, x.detach, x.unbind, lambda: x.view(48), lambda: x[2:4, ::2], lambda: x.expand(3, 8, 6))
    for view in (*views, lambda: x.split(2), lambda: torch.empty_like(x), lambda: x.new_empty(7)):
        assert cost_of(view) == free
    assert cost_of(x.clone) != free
    assert seconds_of(free, device_named("h100")) == 0.0


def test_tables_are_read_where_they_are_asked() -> None:
    table, at = meta(50_000, 64), meta(10, dtype=torch.int64)
    rows = 10 * 64 * 4
    assert cost_of(nn.functional.embedding, at, table) == Cost(0, rows + 80, rows)
    assert cost_of(lambda: table[at]) == Cost(0, rows + 80, rows)
    assert cost_of(table.index_add_, 0, at, meta(10, 64)) == Cost(0, 2 * (rows + 80), rows + 80)
    assert cost_of(lambda: aten.embedding_dense_backward(meta(10, 64), at, 50_000, -1, False)).written == 50_000 * 256


def test_a_fused_optimizer_reads_and_writes_four() -> None:
    parameters = [torch.randn(1000), torch.randn(24)]
    lists = [[torch.zeros_like(p) for p in parameters] for _ in range(3)]
    steps = [torch.tensor(1.0) for _ in parameters]
    found = cost_of(
        lambda: torch._fused_adamw_(
            parameters, *lists, [], steps,
            lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )
    )  # fmt: skip
    assert found == Cost(0, 4 * 4096 + 8, 4 * 4096)  # it writes gradients if it unscales them


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


def test_the_longer_of_computing_and_moving_counts() -> None:
    device = dataclasses.replace(
        device_named("a100"), bf16=100e12, fp32=10e12, tf32=50e12, fp16=None, fp8=None, bandwidth=1e12,
        matmul_efficiency=0.5, memory_efficiency=0.8,
    )  # fmt: skip
    by_dtype = {"bfloat16": 0.02, "float32": 0.2, "": 0.2, "tf32": 0.04, "float64": 0.4, "float16": 0.2}
    for dtype, wanted in by_dtype.items():  # there are no units for float16: as float32
        assert seconds_of(Cost(10**12, 10**9, 0, dtype), device) == pytest.approx(wanted)
    assert seconds_of(Cost(10**6, 3 * 10**9, 10**9, "bfloat16"), device) == pytest.approx(0.005)
    assert seconds_of(Cost(0, 0, 512), device) == HOST_CALL


def test_eight_bits_are_multiplied_by_their_own_units() -> None:
    h100, a100 = device_named("h100"), device_named("a100")
    fp8, bf16, fp16 = (Cost(2 * 8192**3, 0, 0, dtype) for dtype in ("float8_e4m3fn", "bfloat16", "float16"))
    assert seconds_of(fp8, h100) < 0.51 * seconds_of(bf16, h100)
    assert seconds_of(fp8, a100) == seconds_of(fp16, a100)


def test_a_step_of_small_operators_takes_the_hosts_time() -> None:
    h100 = device_named("h100")
    long = Operator("aten.mm", "forward", 0, flops=10**15, dtype="bfloat16")
    short = Operator("aten.add", "backward", 0, read=512, written=512)
    found = phase_seconds([long, *[short] * 1000], h100)
    assert found == {"forward": seconds_of(long, h100), "backward": pytest.approx(1000 * HOST_CALL)}


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


def test_a_record_has_the_costs_of_its_calls() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2), nn.Linear(36, 36))
        x = torch.randn(2, 3, 8, 8)
        with Recorder(model) as recorder:
            model(x).sum().backward()
    by_name = {each.name: each for each in recorder.record.operators}
    assert {each.dtype for each in recorder.record.operators} == {"float32", "tf32"}
    convolution, product = by_name["aten.convolution"], by_name["aten.addmm"]
    assert (convolution.dtype, convolution.flops) == ("tf32", 2 * 2 * 4 * 36 * 27)
    assert (product.dtype, product.flops) == ("float32", 2 * 2 * 4 * 36 * 36)
