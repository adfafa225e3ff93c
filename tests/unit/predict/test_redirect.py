"""CUDA's names on a machine without CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from disthooks.errors import UsageError
from disthooks.predict.cuda.redirect import foreach_as_on_cuda, redirect_cuda
from disthooks.predict.fake.fake_run import fake_run
from disthooks.predict.hardware.devices import device_named

CPU = torch.device("cpu")
WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a factory": lambda x: torch.zeros(2, device="cuda"),
    "a factory, numbered": lambda x: torch.arange(2, device="cuda:1"),
    "a number": lambda x: torch.ones(2, device=0),
    "a device": lambda x: torch.ones(2, device=torch.device("cuda", 1)),
    "a device by keyword": lambda x: torch.ones(2, device=torch.device(type="cuda", index=0)),
    "the current device": lambda x: torch.ones(2, device=torch.cuda.current_device()),
    "like": lambda x: torch.zeros_like(x, device="cuda"),
    "new": lambda x: x.new_zeros(2, device="cuda"),
    "a tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "to": lambda x: x.to("cuda"),
    "to, with a dtype": lambda x: x.to("cuda:0", torch.bfloat16, non_blocking=True),
    "to, by keyword": lambda x: x.to(device="cuda", dtype=torch.bfloat16),
    "to, a number": lambda x: x.to(0),
    "cuda": lambda x: x.cuda(),
    "cuda, numbered": lambda x: x.cuda(1, non_blocking=True),
    "pinned": lambda x: torch.zeros(2, pin_memory=True).pin_memory().to("cuda", non_blocking=True),
    "a module's factory": lambda x: nn.Linear(2, 3, device="cuda").weight,
}


@pytest.mark.parametrize("way", WAYS)
def test_each_name_of_cuda_is_the_cpu(way: str) -> None:
    with FakeTensorMode(), redirect_cuda():
        assert WAYS[way](torch.ones(2)).device == CPU


def test_a_module_moves() -> None:
    with redirect_cuda():
        model = nn.Linear(2, 2)
        assert model.to("cuda").weight.device == model.cuda().weight.device == CPU
        assert model.to(torch.device("cuda"), torch.bfloat16).weight.dtype == torch.bfloat16


def test_contexts_of_a_device_work() -> None:
    with FakeTensorMode(), redirect_cuda(device_named("a100")):
        with torch.device("cuda"):
            assert torch.ones(2).device == CPU
        with torch.cuda.device(1):
            torch.cuda.synchronize()
        torch.cuda.set_device(0)
        side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            event.record()
        assert event.query()
        assert side.record_event().elapsed_time(event) == 0
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.is_bf16_supported()


SEED = torch.Generator().manual_seed(3).initial_seed()
#: What a script's builder calls, and what it gets on a named A100.
CALLS: dict[str, tuple[Callable[[], object], object]] = {
    "a generator": (lambda: torch.Generator(device="cuda:1").manual_seed(3).initial_seed() == SEED, True),
    "its class": (lambda: isinstance(torch.Generator("cuda"), torch.Generator), True),
    "random numbers": (lambda: torch.rand(2, device="cuda", generator=torch.Generator("cuda")).shape, (2,)),
    "seeds": (lambda: torch.cuda.manual_seed_all(1), None),
    "a random state": (lambda: torch.cuda.get_rng_state().dtype, torch.uint8),
    "memory": (lambda: torch.cuda.mem_get_info()[1], 81039 << 20),
    "properties": (lambda: torch.cuda.get_device_properties(0).total_memory, 81039 << 20),
    "multiprocessors": (lambda: torch.cuda.get_device_properties("cuda").multi_processor_count, 108),
    "a name": (lambda: torch.cuda.get_device_name(), "A100-SXM-80GB"),
    "bfloat16": (lambda: torch.cuda.is_bf16_supported(including_emulation=False), True),
    "figures": (lambda: torch.cuda.memory_stats()["allocated_bytes.all.peak"], 0),
    "a peak": (lambda: torch.cuda.max_memory_allocated() + torch.cuda.memory.memory_reserved(), 0),
    "a cache": (lambda: torch.cuda.empty_cache(), None),
    "a limit": (lambda: torch.cuda.set_per_process_memory_fraction(0.9), None),
    "nvtx": (lambda: torch.cuda.nvtx.range_push("forward") + torch.cuda.nvtx.range_pop(), 0),
    "capturing": (lambda: torch.cuda.is_current_stream_capturing(), False),
    "an accelerator": (lambda: torch.accelerator.synchronize(), None),
    "a type": (lambda: torch.ones(2).type("torch.cuda.HalfTensor").dtype, torch.float16),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_scripts_ask_of_cuda_has_an_answer(call: str) -> None:
    ask, wanted = CALLS[call]
    with fake_run(), redirect_cuda(device_named("a100")):
        assert ask() == wanted


def test_random_states_can_be_forked() -> None:
    with redirect_cuda():
        before = torch.get_rng_state()
        with torch.random.fork_rng(devices=[0]):
            torch.cuda.manual_seed(5)
            torch.rand(2)
        assert torch.equal(torch.get_rng_state(), before)


def test_what_is_not_known_or_means_nothing_is_named() -> None:
    with redirect_cuda():
        assert torch.cuda.get_device_capability() == (9, 0)
        with pytest.raises(UsageError, match=r'mem_get_info is not known of "cuda": name the device'):
            torch.cuda.mem_get_info()
        with pytest.raises(UsageError, match="total_memory is not known"):
            _ = torch.cuda.get_device_properties(0).total_memory
        with pytest.raises(UsageError, match=r"torch.cuda.CUDAGraph means nothing in a prediction"):
            torch.cuda.CUDAGraph()
        with pytest.raises(AttributeError, match="'L2_cache_size'"):
            _ = torch.cuda.get_device_properties(0).L2_cache_size
    with redirect_cuda(device_named("t4")):
        assert not torch.cuda.is_bf16_supported(including_emulation=False)


def test_other_devices_and_numbers_stay() -> None:
    with FakeTensorMode(), redirect_cuda():
        assert torch.ones(2, device="meta").device.type == "meta"
        assert torch.device("meta").type == "meta"
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        assert torch.ones(3, 4).size(0) == 3
        assert torch.ones(2).to(torch.ones(2, dtype=torch.int32)).dtype == torch.int32


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_everything_is_undone() -> None:
    before = torch.cuda.current_device, torch.cuda.synchronize, torch.set_default_device
    with redirect_cuda():
        assert torch.cuda.current_device is not before[0]
    assert (torch.cuda.current_device, torch.cuda.synchronize, torch.set_default_device) == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
    assert torch.device("cuda").type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_other_threads_are_not_affected() -> None:
    raised: list[type[BaseException]] = []

    def other() -> None:
        for call in (lambda: torch.zeros(2, device="cuda"), torch.cuda.current_device):
            try:
                call()
            except (RuntimeError, AssertionError) as error:
                raised.append(type(error))

    with redirect_cuda():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(raised) == 2


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def step() -> set[str]:
    with FakeTensorMode():
        model = nn.Linear(2, 3)
        adam = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 2)).sum().backward()
        with Names() as names:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
    return {name for name in names.seen if "_foreach_" in name}


def test_optimizers_take_all_parameters_at_once_as_on_cuda() -> None:
    assert step() == set()
    with foreach_as_on_cuda():
        assert {"aten::_foreach_norm", "aten::_foreach_mul_", "aten::_foreach_addcdiv_"} <= step()
    assert step() == set()
