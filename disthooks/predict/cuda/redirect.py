"""The device name "cuda" where there is no CUDA: it means the CPU's fake tensors."""

# [Note: how a device is named]
# A script names a device as a string, as a `torch.device`, as a number, or by a method (`.cuda()`). All of these reach
# torch through calls that a `TorchFunctionMode` sees, and the constructor of `torch.device` is one of them. Only what
# names CUDA is replaced; "meta" and others stay. The functions of `torch.cuda` that wait, count or choose a device do
# nothing. `torch.cuda.is_available()` still says False: a script that asks gets the truth. What a script reads of the
# device (its name, its memory, its compute capability) is that of the named GPU. A call that means nothing in a
# prediction (a CUDA graph, an allocation by address) raises an error that names it.

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.optim.optimizer as optimizer
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

from disthooks.errors import UsageError
from disthooks.predict.cuda.overrides import Replacements
from disthooks.predict.hardware.devices import CAPABILITY, Device

_CPU = torch.device("cpu")


@contextlib.contextmanager
def redirect_cuda(hardware: Device | None = None) -> Iterator[None]:
    """Let code that names CUDA run on a machine without it, in this thread: each such name means the CPU.

    It is made for fake tensors. Memory is not pinned, and ``tensor.device`` is the CPU. Without ``hardware`` the
    compute capability is ``CAPABILITY``, and reading the memory is a UsageError.

    >>> with redirect_cuda():
    ...     torch.ones(2, device="cuda").cuda(), torch.device("cuda"), torch.nn.Linear(2, 2).to("cuda").weight.device
    (tensor([1., 1.]), device(type='cpu'), device(type='cpu'))
    """
    with _replacements.active(_Gpu(hardware)), _CudaIsCpu():
        yield


class _Gpu(NamedTuple):
    """What a script can read of the device."""

    hardware: Device | None

    @property
    def capability(self) -> tuple[int, int]:
        return CAPABILITY if self.hardware is None else self.hardware.capability

    @property
    def name(self) -> str:
        return "NVIDIA GPU" if self.hardware is None else self.hardware.name

    def known(self, what: str) -> Device:
        if self.hardware is None:
            raise UsageError(f'{what} is not known of "cuda": name the device, such as device="h100"')
        return self.hardware


class Properties:
    """What ``torch.cuda.get_device_properties`` gives, as far as a prediction knows it."""

    def __init__(self, gpu: _Gpu) -> None:
        self._gpu = gpu
        self.name = gpu.name
        self.major, self.minor = gpu.capability
        self.warp_size = 32

    @property
    def total_memory(self) -> int:
        return self._gpu.known("total_memory").memory_bytes

    @property
    def multi_processor_count(self) -> int:
        return self._gpu.known("multi_processor_count").multiprocessors

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a prediction does not know {name!r} of the properties of a device")


def _is_cuda(device: object) -> bool:
    return isinstance(device, torch.device) and device.type == "cuda"


def _names_cuda(device: object) -> bool:
    return _is_cuda(device) or (isinstance(device, str) and device.partition(":")[0] == "cuda")


def _is_number(device: object) -> bool:
    return isinstance(device, int) and not isinstance(device, bool)


class _CudaIsCpu(TorchFunctionMode):
    """Replaces CUDA in the arguments of each call; see [Note: how a device is named]."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            is_cuda = any(_names_cuda(each) or _is_number(each) for each in (*args[:1], *kwargs.values()))
            return _CPU if is_cuda else func(*args, **kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and (_names_cuda(args[1]) or _is_number(args[1])):
            args = (args[0], _CPU, *args[2:])
        args = tuple(_CPU if _is_cuda(each) else each for each in args)
        device = kwargs.get("device")
        if _names_cuda(device) or _is_number(device):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


class Idle:
    """A stream or an event that has nothing to wait for. Its methods return itself, which is true."""

    device = _CPU
    cuda_stream = stream_id = 0

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def elapsed_time(self, end: object) -> float:
        return 0.0


def _answer(value: Any) -> Callable[..., Any]:
    def answer(before: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _by_gpu(answer: Callable[[_Gpu], Any]) -> Callable[..., Any]:
    def call(before: Any, *args: Any, **kwargs: Any) -> Any:
        gpu = _replacements.setting
        assert gpu is not None
        return answer(gpu)

    return call


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(before: Any, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"{name} means nothing in a prediction, because nothing runs on a GPU: leave it out")

    return refuse


def _memory(gpu: _Gpu) -> tuple[int, int]:
    """What ``mem_get_info`` says of a device on which nothing runs: the bytes that are free, and all."""
    found = gpu.known("torch.cuda.mem_get_info")
    return found.usable_bytes, found.memory_bytes


def _has_bf16(before: Any, including_emulation: bool = True) -> bool:
    gpu = _replacements.setting
    return including_emulation or (gpu is not None and gpu.capability >= (8, 0))


def _on_cpu(before: Any, *args: Any, **kwargs: Any) -> Any:
    args, device = args[:0] if args and _names_cuda(args[0]) else args, kwargs.get("device")
    return before(*args, **({} if _names_cuda(device) else kwargs))


def _fork_rng(before: Any, devices: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Fork the random state of the CPU alone: it is CUDA's too."""
    is_cuda = _names_cuda(kwargs.get("device_type", "cuda"))
    return before([], enabled) if is_cuda else before(devices, enabled, *args, **kwargs)


def _default_device(before: Any, device: Any) -> Any:
    return before(_CPU if _names_cuda(device) else device)


#: What functions of ``torch.cuda`` give. Those of memory and of random numbers stand in modules of their own too.
_ANSWERS: dict[str, Any] = {
    **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device", "current_blas_handle"), 0),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", "init", "set_stream"), None),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    **dict.fromkeys(("memory_cached", "max_memory_cached", "utilization", "memory_usage"), 0),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated"), None),
    **dict.fromkeys(("reset_max_memory_cached", "set_per_process_memory_fraction", "_record_memory_history"), None),
    **dict.fromkeys(("_dump_snapshot", "_sleep", "manual_seed", "manual_seed_all", "seed", "seed_all"), None),
    **dict.fromkeys(("set_rng_state", "set_rng_state_all"), None),
    **dict.fromkeys(("Stream", "Event", "ExternalStream", "current_stream", "default_stream"), Idle()),
    "memory_stats": collections.defaultdict(int),
    "memory_summary": "",
    "memory_snapshot": [],
    "is_current_stream_capturing": False,
    "can_device_access_peer": True,
}
#: What of ``torch.cuda`` means nothing where nothing runs.
_REFUSED = (
    *("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle", "MemPool", "cudart"),
    *("caching_allocator_alloc", "caching_allocator_delete", "get_stream_from_external"),
)


def _functions() -> Mapping[tuple[Any, str], Callable[..., Any]]:
    """What functions of ``torch.cuda`` answer, and those of torch that take a device but are seen by no mode."""
    random: Any = torch.random
    by_name: dict[str, Callable[..., Any]] = {name: _answer(value) for name, value in _ANSWERS.items()}
    by_name |= {name: _refuse(f"torch.cuda.{name}") for name in _REFUSED}
    by_name |= {
        "get_device_capability": _by_gpu(lambda gpu: gpu.capability),
        "get_device_name": _by_gpu(lambda gpu: gpu.name),
        "get_device_properties": _by_gpu(Properties),
        "mem_get_info": _by_gpu(_memory),
        "is_bf16_supported": _has_bf16,
        "is_tf32_supported": _by_gpu(lambda gpu: gpu.capability >= (8, 0)),
        "initial_seed": lambda before: torch.initial_seed(),
        "get_rng_state": lambda before, *args: torch.get_rng_state(),
        "get_rng_state_all": lambda before: [torch.get_rng_state()],
    }
    owners: tuple[Any, ...] = (torch.cuda, torch.cuda.memory, torch.cuda.random)
    found = {(owner, name): made for owner in owners for name, made in by_name.items() if name in vars(owner)}
    ranges = ("range_push", "range_pop", "range_start", "range_end", "mark")
    found |= {(torch.cuda.nvtx, name): _answer(0) for name in ranges}
    accelerator: Any = getattr(torch, "accelerator", None)
    for name in ("synchronize", "empty_cache", "set_device_index", "current_device_index", "set_stream"):
        if hasattr(accelerator, name):
            found[accelerator, name] = _answer(0 if name == "current_device_index" else None)
    devices = {(torch, "Generator"): _on_cpu, (torch, "set_default_device"): _default_device}
    return found | devices | {(random, "fork_rng"): _fork_rng}


_replacements: Replacements[_Gpu] = Replacements(_functions)


# --- the optimizers' default ---


@contextlib.contextmanager
def foreach_as_on_cuda() -> Iterator[None]:
    """Let optimizers and ``clip_grad_norm_`` treat fake parameters of the CPU as they treat CUDA's, in this thread.

    On CUDA an optimizer whose ``foreach`` is None works on all parameters at once, which is faster and needs more
    memory during the step. On the CPU it works on one parameter after the other.
    """
    with _foreach.active(True), _fake_types():
        yield


_foreach: Replacements[bool] = Replacements(
    lambda: {(optimizer, "_get_foreach_kernels_supported_devices"): lambda before: [*before(), "cpu"]}
)


@contextlib.contextmanager
def _fake_types() -> Iterator[None]:
    """Add fake tensors to the types that torch's functions for lists of tensors take. Real tensors are not affected."""
    # The optimizers have a list, and `torch.nn.utils` has another.
    lists: list[list[Any]] = [_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types]
    for types in lists:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in lists:
            types.remove(FakeTensor)
