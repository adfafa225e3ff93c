"""What a script calls of CUDA has an answer in a prediction, on a machine without CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from disthooks import explain
from disthooks.errors import UsageError

CPU, X = torch.device("cpu"), torch.ones(2, 2)
#: The ways to name a device. Each gives a tensor or a module.
WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
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
    "a module that moves": lambda x: nn.Linear(2, 2).to("cuda").cuda().to(torch.device("cuda"), torch.bfloat16).weight,
}


def streams() -> float:
    side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.device("cuda"), torch.cuda.device(1), torch.cuda.stream(side):
        event.record()
    torch.cuda.synchronize()
    return float(side.record_event().elapsed_time(event)) if event.query() else -1.0


def forked() -> bool:
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(5)
        torch.rand(2)
    return torch.equal(torch.get_rng_state(), before)


SEED = torch.Generator().manual_seed(3).initial_seed()
#: What a script asks, and what it gets on a named A100.
CALLS: dict[str, tuple[Callable[[], object], object]] = {
    "a generator": (lambda: torch.Generator(device="cuda:1").manual_seed(3).initial_seed() == SEED, True),
    "its class": (lambda: isinstance(torch.Generator("cuda"), torch.Generator), True),
    "random numbers": (lambda: torch.rand(2, device="cuda", generator=torch.Generator("cuda")).shape, (2,)),
    "seeds": (lambda: torch.cuda.manual_seed_all(1), None),
    "a random state": (lambda: torch.cuda.get_rng_state().dtype, torch.uint8),
    "a random state that is forked": (forked, True),
    "streams and events": (streams, 0.0),
    "a device that is set": (lambda: torch.cuda.set_device(0), None),
    "a capability": (lambda: torch.cuda.get_device_capability(), (8, 0)),
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
    "another device": (lambda: torch.ones(2, device="meta").device.type + torch.device("meta").type, "metameta"),
}


def asked(device: str, ask: Callable[[], Any]) -> Any:
    """What ``ask`` gives in a function that builds a model, for a prediction."""
    found = []

    def build() -> tuple[nn.Module, torch.Tensor]:
        found.append(ask())
        return nn.Linear(2, 2), torch.ones(2, 2)

    explain(build, device=device)
    return found[0]


@pytest.mark.parametrize("way", WAYS)
def test_each_name_of_cuda_is_the_cpu(way: str) -> None:
    assert asked("cuda", lambda: WAYS[way](torch.ones(2)).device) == CPU


@pytest.mark.parametrize("call", CALLS)
def test_what_scripts_ask_of_cuda_has_an_answer(call: str) -> None:
    ask, wanted = CALLS[call]
    assert asked("a100", ask) == wanted


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: torch.cuda.mem_get_info(), r'mem_get_info is not known of "cuda": name the device'),
        (lambda: torch.cuda.get_device_properties(0).total_memory, "total_memory is not known"),
        (lambda: torch.cuda.CUDAGraph(), r"torch.cuda.CUDAGraph means nothing in a prediction"),
        (lambda: torch.cuda.get_device_properties(0).L2_cache_size, "'L2_cache_size'"),
    ],
)
def test_what_is_not_known_or_means_nothing_is_named(ask: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        asked("cuda", ask)


def test_without_a_name_it_is_a_hopper_and_an_old_gpu_has_no_bfloat16() -> None:
    assert asked("cuda", torch.cuda.get_device_capability) == (9, 0)
    assert not asked("t4", lambda: torch.cuda.is_bf16_supported(including_emulation=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_other_threads_have_no_cuda_meanwhile_and_nobody_afterwards() -> None:
    before, raised = (torch.cuda.current_device, torch.cuda.synchronize), list[type[BaseException]]()

    def other() -> None:
        for call in (lambda: torch.zeros(2, device="cuda"), torch.cuda.current_device):
            try:
                call()
            except (RuntimeError, AssertionError) as error:
                raised.append(type(error))

    def started() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    asked("cuda", started)
    assert len(raised) == 2
    other()
    assert len(raised) == 4
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
