"""Fake tensors of the CPU save for backward what CUDA's operators save."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from disthooks.predict.cuda.attention import Attention, Gpu, attention_order, choose_backend
from disthooks.predict.cuda.substitutes import as_on_cuda
from disthooks.predict.fake.kernels import FakeKernels
from tests.support.cuda_saves import BF16, CASES, saved_bytes

A100, H100 = (8, 0), (9, 0)


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_are_those_of_the_formula_and_shapes_those_of_the_cpu(name: str, fake: FakeTensorMode) -> None:
    case = CASES[name]
    forward, weights = case.make("cpu")
    out = forward()
    out.sum().backward()
    before = [each.grad for each in weights]
    with as_on_cuda(case.backend, capability=A100):
        assert saved_bytes(forward, weights) == case.nbytes
        on_cuda = forward()
    for one, other in zip([out, *before], [on_cuda, *(each.grad for each in weights)], strict=True):
        assert (one is None and other is None) or (one.shape, one.dtype) == (other.shape, other.dtype)


def query(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape or (2, 4, 100, 64), dtype=dtype, requires_grad=True)


def call(q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None, **kwargs: object) -> Attention:
    k, v = q if k is None else k, q if v is None else v
    wanted = {"mask": None, "dropout": 0.0, "is_causal": False, "scale": None, "is_grouped": False, **kwargs}
    return Attention(q, k, v, **wanted)


def choice(capability: tuple[int, int], *tensors: torch.Tensor, **kwargs: object) -> str:
    return choose_backend(call(*tensors, **kwargs), Gpu(attention_order(None, capability), capability))


def test_torch_chooses_cudnn_first_on_hopper_and_flash_on_ampere(fake: FakeTensorMode) -> None:
    assert choice(H100, query()) == "cudnn"
    assert choice(A100, query()) == "flash"
    assert choice((7, 5), query(dtype=torch.float16)) == "efficient"
    assert choice(A100, query(dtype=torch.float32)) == choice(H100, query(dtype=torch.float32)) == "efficient"
    assert choice(A100, query(dtype=torch.float64)) == "math"


def test_what_a_backend_cannot_do_goes_to_the_next(fake: FakeTensorMode) -> None:
    mask = torch.ones(100, 100, dtype=torch.bool)
    few = query(2, 2, 100, 64)
    assert choice(A100, query(), mask=mask) == "efficient"
    assert choice(H100, query(), mask=mask) == "cudnn"
    assert choice(H100, query(), mask=torch.zeros(100, 100, dtype=BF16, requires_grad=True)) == "efficient"
    assert choice(A100, query(), few, few, is_grouped=True) == "flash"
    assert choice(A100, query(), few, few, is_grouped=True, mask=mask) == "math"  # efficient has no groups
    assert choice(H100, query(), dropout=0.1) == "flash"  # cuDNN's probabilities are multiples of 1/16
    assert choice(H100, query(), dropout=0.125) == "cudnn"
    assert choice(A100, query(), query(2, 4, 50, 64), query(2, 4, 50, 64), is_causal=True) == "efficient"
    assert choice(A100, query(2, 4, 100, 300)) == "math"  # flash has at most 256, efficient multiples of 8
    assert choice(A100, query(2, 4, 100, 320)) == "efficient"
    assert choice((8, 6), query(2, 4, 100, 200)) == "efficient"  # no backward of flash there
    assert choice(A100, query(2, 4, 100, 200)) == "flash"
    assert choice(A100, query(4, 100, 64)) == "math"


def test_the_switches_of_torch_hold(fake: FakeTensorMode) -> None:
    with sdpa_kernel([SDPBackend.MATH]):
        assert choice(A100, query()) == "math"
    with (
        sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
        as_on_cuda("flash"),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        F.scaled_dot_product_attention(*[query(dtype=torch.float32)] * 3)


def test_an_order_that_a_script_sets_holds(fake: FakeTensorMode) -> None:
    wanted = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]

    def node() -> str:
        return type(F.scaled_dot_product_attention(*[query()] * 3).grad_fn).__name__

    with as_on_cuda("flash"):
        with sdpa_kernel(wanted):  # without an order
            assert "Flash" in node()
        with sdpa_kernel(wanted, set_priority=True):
            assert "Efficient" in node()
        assert "Flash" in node()


def test_a_backend_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="'flash', 'efficient', 'cudnn', 'math'"), as_on_cuda("fast"):
        pass


def test_operators_that_do_not_differ_save_what_they_save_on_the_cpu() -> None:
    """The bytes of a real run on the CPU."""

    def model() -> tuple[nn.Module, torch.Tensor]:
        layers = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 49, 20),
            nn.GELU(),
            nn.Softmax(-1),
        )
        return layers, torch.ones(4, 3, 16, 16, requires_grad=True)

    layers, tensor = model()
    real = saved_bytes(lambda: layers(tensor), layers.parameters())
    with FakeTensorMode():
        layers, tensor = model()
        with as_on_cuda():
            assert saved_bytes(lambda: layers(tensor), layers.parameters()) == real


def nodes(tensor: torch.Tensor) -> list[str]:
    """The names of autograd's nodes of some operators, for ``tensor`` of ``[4, 8]``."""
    outs = [F.dropout(tensor), F.rms_norm(tensor, [8]), F.scaled_dot_product_attention(*[tensor[None, None]] * 3)]
    return [type(out.grad_fn).__name__ for out in outs]


def test_real_tensors_and_other_threads_are_not_affected() -> None:
    real = nodes(torch.zeros(4, 8, requires_grad=True))
    found: list[list[str]] = []

    def other() -> None:
        with FakeTensorMode():
            found.append(nodes(torch.zeros(4, 8, requires_grad=True)))

    other()
    with as_on_cuda():
        assert nodes(torch.zeros(4, 8, requires_grad=True)) == real
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found[0] == found[1]


def test_some_outputs_are_never_channels_last() -> None:
    real = torch.zeros(2, 8, 6, 6).to(memory_format=torch.channels_last)
    calls = [lambda x: F.pad(x, (1, 2, 3, 4), "reflect"), lambda x: F.pad(x, (1, 2, 3, 4), "replicate")]
    for call in (*calls, lambda x: F.pixel_shuffle(x, 2)):
        with FakeKernels() as fake:
            tensor = fake.from_tensor(real)
            on_cpu = call(tensor)
            with as_on_cuda():
                on_cuda = call(tensor)
        assert on_cuda.shape == on_cpu.shape
        assert on_cuda.is_contiguous()
        assert on_cpu.is_contiguous(memory_format=torch.channels_last)
        assert on_cpu.stride() == call(real).stride()


@pytest.fixture
def many_ranks() -> Iterator[DeviceMesh]:
    """Eight ranks of torch's fake process group."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield init_device_mesh("cpu", (8,))
    finally:
        torch.distributed.destroy_process_group()


def test_batch_norm_over_all_ranks(many_ranks: DeviceMesh, fake: FakeTensorMode) -> None:
    norm = nn.SyncBatchNorm(16)
    tensor = torch.zeros(8, 16, 10, 10, requires_grad=True)
    with as_on_cuda():
        found = saved_bytes(lambda: norm(tensor), [*norm.parameters(), *norm.buffers()])
    assert found == 4 * 8 * 16 * 100 + 2 * 16 * 4 + 8 * 4
    assert tensor.grad is not None
    assert norm.weight.grad is not None
    with pytest.raises(ValueError, match="expected input tensor to be on"):
        norm(tensor)


def test_distributed_tensors_save_their_shards(many_ranks: DeviceMesh, fake: FakeTensorMode) -> None:
    """Norms, dropout and attention of a DTensor: outputs as CUDA makes them, of the local shape."""
    wide = DTensor.from_local(torch.zeros(2, 16, 32, dtype=BF16), many_ranks, [Shard(1)]).requires_grad_()
    heads = DTensor.from_local(torch.zeros(2, 4, 16, 8, dtype=BF16), many_ranks, [Shard(1)]).requires_grad_()
    with as_on_cuda("flash"):
        norm, rms = F.layer_norm(wide, [32]).grad_fn, F.rms_norm(wide, [32]).grad_fn
        attention = F.scaled_dot_product_attention(heads, heads, heads).grad_fn
    for saved, dtype, shape in [
        (norm._saved_result1, torch.float32, (2, 16, 1)),
        (rms._saved_result1, torch.float32, (2, 16, 1)),
        (attention._saved_logsumexp, torch.float32, (2, 4, 16)),
        (attention._saved_output, BF16, (2, 4, 16, 8)),
    ]:
        assert (saved.to_local().dtype, saved.to_local().shape) == (dtype, shape)
