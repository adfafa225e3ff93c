"""CUDA's autocast on fake tensors of the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from disthooks.predict.cuda import autocast
from disthooks.predict.cuda.autocast import cuda_autocast
from disthooks.predict.cuda.overrides import has_kernel
from disthooks.predict.cuda.substitutes import as_on_cuda
from tests.support.cuda_saves import BF16, FP16, FP32, saved_bytes

# These operators of torch's lists have no fake kernel without CUDA, or they read data.
NOT_HERE = ("cudnn_convolution", "cudnn_convolution_transpose", "equal")
LISTS = {
    "torch_fp16": (torch, FP16),
    "torch_fp32": (torch, FP32),
    "torch_need_autocast_promote": (torch, FP32),
    "nn_fp16": (torch._C._nn, FP16),
    "nn_fp32": (torch._C._nn, FP32),
    "linalg_fp16": (torch._C._linalg, FP16),
    "methods_fp16": (torch.Tensor, FP16),
    "methods_fp32": (torch.Tensor, FP32),
    "torch_expect_builtin_promote": (torch, FP32),
    "methods_expect_builtin_promote": (torch.Tensor, FP32),
}


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_operators_cast_as_torchs_own_tests_say(name: str, fake: FakeTensorMode) -> None:
    owner, expected = LISTS[name]
    checked = 0
    for entry in getattr(AutocastTestLists("cpu"), name):
        operator, args, *rest = entry
        if operator in NOT_HERE or rest[:1] == [True]:
            continue
        kwargs = next((each for each in rest if isinstance(each, dict)), {})
        wanted = next((each for each in rest if isinstance(each, torch.dtype)), expected)
        if operator == "einsum":  # torch's equation is for more dimensions than its arguments have
            args = ("ij,jk->ik", *rest[0])
        args = pytree.tree_map_only(torch.Tensor, fake.from_tensor, args)
        with cuda_autocast(), torch.autocast("cuda", FP16):
            out = getattr(owner, operator)(*args, **kwargs)
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                assert each.dtype == wanted, operator
                checked += 1
    assert checked


def test_the_tables_name_every_operator_that_torch_casts_on_cuda() -> None:
    """An operator that a new torch adds to another policy than float32 would have to be in a table."""
    named = autocast.LOWER_PRECISION | autocast.FLOAT32_RESULT | autocast.PROMOTE | set(autocast.APPENDED_DTYPE)
    assert {name for name in named if not has_kernel(name, "AutocastCUDA")} == set()
    others = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name.removeprefix("aten::"), "AutocastCUDA")
    } - named
    float32 = {entry[0] for entry in AutocastTestLists("cpu").torch_fp32 + AutocastTestLists("cpu").nn_fp32}
    for name in others - {autocast.BANNED, autocast.RNN}:  # builds for CUDA have a kernel of the RNN
        assert autocast.cuda_policy(name) is autocast._float32
    assert {"exp", "layer_norm", "mse_loss"} <= others
    assert len(float32 & {name.partition(".")[0] for name in others}) > 25


def test_one_copy_of_a_weight_in_a_region(fake: FakeTensorMode) -> None:
    """A weight that torch's kernel casts first (linear) or ours (einsum, bmm of views) has one copy of 2 bytes each."""
    weight = torch.zeros(16, 16, requires_grad=True)
    tensor = torch.zeros(4, 16)

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", BF16):
            first = torch.einsum("ij,jk->ik", F.linear(tensor, weight), weight)
            return torch.einsum("ij,jk->ik", first, weight) + F.linear(first, weight)

    with cuda_autocast():
        once = saved_bytes(forward, [weight])
    # The copy; the cast input; the outputs of the first linear and of the first einsum, which others read.
    assert once == 2 * 16 * 16 + 2 * 4 * 16 + 2 * 4 * 16 + 2 * 4 * 16
    assert weight.grad.dtype == FP32


def test_a_model_saves_what_it_saves_under_cudas_autocast(fake: FakeTensorMode) -> None:
    """Norm, linear, attention, softmax: float32 where CUDA's autocast says so, bfloat16 elsewhere."""
    tokens, width = 32, 64
    norm, qkv, out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
    tensor = torch.zeros(1, tokens, width, requires_grad=True)

    def forward() -> torch.Tensor:
        q, k, v = qkv(norm(tensor)).view(1, tokens, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, tokens, width)
        return out(y).softmax(-1)

    def in_region() -> torch.Tensor:
        with torch.autocast("cuda", BF16):
            return forward()

    weights = [*norm.parameters(), *qkv.parameters(), *out.parameters()]
    with as_on_cuda("flash"), cuda_autocast():
        found = saved_bytes(in_region, weights)
    expected = {
        "the input of the norm": 4 * tokens * width,
        "mean and deviation": 2 * 4 * tokens,
        "the norm's output, cast for qkv": 2 * tokens * width,
        "copies of both weights": 2 * (3 * width * width + width * width),
        "q, k, v: one storage": 2 * 3 * tokens * width,
        "attention's output, which `out` reads": 2 * tokens * width,
        "logsumexp and random state": 4 * 4 * tokens + 24,
        "softmax in float32": 4 * tokens * width,
    }
    assert found == sum(expected.values())


@pytest.mark.parametrize(
    "module", [nn.LSTM(8, 16), nn.LSTMCell(8, 16), nn.GRUCell(8, 16)], ids=lambda m: type(m).__name__
)
def test_recurrent_modules_work_in_lower_precision(module: nn.Module, fake: FakeTensorMode) -> None:
    module = type(module)(8, 16)
    tensor = torch.zeros(*(5, 4, 8) if isinstance(module, nn.LSTM) else (4, 8), requires_grad=True)
    with as_on_cuda(), cuda_autocast(), torch.autocast("cuda", BF16):
        out = pytree.tree_leaves(module(tensor))[0]
        assert out.dtype == BF16
        out.sum().backward()
    assert {weight.grad.dtype for weight in module.parameters() if weight.grad is not None} == {FP32}


def test_binary_cross_entropy_is_refused_as_on_cuda(fake: FakeTensorMode) -> None:
    half = torch.full((3,), 0.5)
    with cuda_autocast(), torch.autocast("cuda", BF16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(half, half)
    with cuda_autocast():
        F.binary_cross_entropy(half, half)


def test_a_region_of_cuda_works_without_cuda(fake: FakeTensorMode) -> None:
    tensor, weight = torch.zeros(4, 4), torch.zeros(4, 4, requires_grad=True)
    with warnings.catch_warnings(), cuda_autocast():
        warnings.simplefilter("error")
        with torch.autocast("cuda"):
            assert (tensor @ tensor).dtype == FP16  # CUDA's default, where the CPU's is bfloat16
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == FP16
            with torch.autocast("cuda", enabled=False):
                assert (tensor @ tensor).dtype == FP32
                assert not torch.is_autocast_enabled("cuda")
            with torch.autocast(device_type="cuda", dtype=BF16):
                assert (tensor @ tensor).dtype == torch.get_autocast_dtype("cuda") == BF16
            assert (tensor @ tensor).dtype == FP16
        with torch.amp.autocast("cuda", BF16):
            out = checkpoint(lambda weight: weight.exp() @ weight, weight, use_reentrant=False)
            assert out.dtype == BF16
        out.sum().backward()

        @torch.autocast("cuda", dtype=BF16)
        def decorated() -> torch.Tensor:
            return weight @ weight

        assert decorated().dtype == BF16


class _Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=BF16)
    def forward(ctx, tensor):  # type: ignore[no-untyped-def]
        assert not torch.is_autocast_enabled("cuda")
        ctx.save_for_backward(tensor)
        return tensor * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (tensor,) = ctx.saved_tensors
        return grad * tensor


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_other_ways_to_ask_for_cudas_autocast(fake: FakeTensorMode) -> None:
    tensor = torch.zeros(4, 4, requires_grad=True)
    with cuda_autocast():
        with torch.cuda.amp.autocast(dtype=BF16):
            assert (tensor @ tensor).dtype == torch.get_autocast_gpu_dtype() == BF16
            assert torch.is_autocast_enabled()
            out = _Cast.apply(tensor)
            assert out.dtype == BF16
        out.sum().backward()
    assert tensor.grad.dtype == FP32


def test_outside_of_a_region_nothing_is_cast(fake: FakeTensorMode) -> None:
    tensor = torch.ones(4, 4, dtype=BF16)
    with cuda_autocast():
        assert tensor.exp().dtype == tensor.sum().dtype == F.layer_norm(tensor, [4]).dtype == BF16
