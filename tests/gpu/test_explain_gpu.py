"""What a real GPU's operators save is what was predicted for them on fake tensors of the CPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from disthooks.predict.cuda.attention import Attention, Gpu, attention_order, choose_backend
from disthooks.predict.cuda.autocast import cuda_autocast
from disthooks.predict.cuda.redirect import redirect_cuda
from disthooks.predict.cuda.substitutes import as_on_cuda
from tests.support.cuda_saves import BF16, CASES, FP16, FP32, saved_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Where cuDNN does not say how many bytes it needs, the prediction is an estimate.
ESTIMATED = 0.5
KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}


def backends(name: str | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if name is None else sdpa_kernel(KERNELS[name], set_priority=True)


@pytest.mark.parametrize("name", CASES)
def test_an_operator_saves_what_was_predicted(name: str) -> None:
    case = CASES[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        forward, weights = case.make("cpu")
        with as_on_cuda(case.backend, capability=torch.cuda.get_device_capability()):
            predicted = saved_bytes(forward, weights)
    forward, weights = case.make("cuda")
    with backends(case.backend):
        real = saved_bytes(forward, weights)
    assert real == pytest.approx(predicted, rel=0 if case.is_exact else ESTIMATED)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("head", [64, 60, 192, 256, 320])
def test_the_choice_of_a_backend_is_torchs(dtype: torch.dtype, mask: bool, groups: int, head: int) -> None:
    query = torch.zeros(2, 8, 128, head, dtype=dtype, device="cuda", requires_grad=True)
    key, value = (torch.zeros(2, 8 // groups, 128, head, dtype=dtype, device="cuda", requires_grad=True) for _ in "kv")
    read = torch.ones(128, 128, dtype=torch.bool, device="cuda") if mask else None
    chosen = SDPBackend(torch._fused_sdp_choice(query, key, value, read, enable_gqa=groups > 1))
    capability = torch.cuda.get_device_capability()
    call = Attention(query, key, value, read, 0.0, False, None, groups > 1)
    ours = choose_backend(call, Gpu(attention_order(None, capability), capability))
    assert chosen.name.partition("_")[0].lower() == ours


def test_autocast_of_cuda_casts_as_was_predicted() -> None:
    """Each operator of the tables whose arguments are two matrices, or one."""
    unary = ["exp", "log", "sum", "prod", "cumsum", "rsqrt", "norm", "softmax", "sin", "relu", "sigmoid"]

    def run(device: str) -> list[torch.dtype]:
        low, high = torch.ones(4, 4, dtype=BF16, device=device), torch.ones(4, 4, device=device)
        with torch.autocast("cuda", BF16):
            outs = [getattr(low, name)(*[-1] * (name in ("softmax", "cumsum"))) for name in unary]
            outs += [torch.cat([low, high]), torch.stack([low, high]), low + high, high @ high, torch.atan2(low, high)]
            outs += [F.layer_norm(low, [4]), F.mse_loss(low, low), torch.einsum("ij,jk->ik", high, high)]
        return [out.dtype for out in outs]

    with FakeTensorMode(), cuda_autocast():
        predicted = run("cpu")
    assert run("cuda") == predicted


def test_device_names_mean_what_they_mean_on_a_gpu() -> None:
    with FakeTensorMode(), redirect_cuda():
        assert torch.ones(2, device="cuda").device.type == "cpu"
    assert torch.ones(2, device="cuda").device.type == "cuda"
