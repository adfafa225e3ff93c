"""The device name "cuda" where there is no CUDA: it means the CPU's fake tensors."""

# [Note: how a device is named]
# A script names a device as a string, as a `torch.device`, as a number, or by a method (`.cuda()`). All of these reach
# torch through calls that a `TorchFunctionMode` sees, and the constructor of `torch.device` is one of them. Only what
# names CUDA is replaced; "meta" and others stay. The functions of `torch.cuda` that wait, count or choose a device do
# nothing. `torch.cuda.is_available()` still says False: a script that asks gets the truth. A `torch.Generator` of CUDA
# cannot be made.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.optim.optimizer as optimizer
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

from disthooks.predict.cuda.overrides import Replacements

_CPU = torch.device("cpu")


@contextlib.contextmanager
def redirect_cuda(*, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Let code that names CUDA run on a machine without it, in this thread: each such name means the CPU.

    It is made for fake tensors. ``device="cuda"`` in a factory, ``torch.device("cuda:1")``, ``.to("cuda")`` and
    ``.cuda()`` of a tensor or a module, and ``torch.cuda.current_device()``, ``set_device``, ``synchronize``,
    ``empty_cache``, streams, events and the like work inside. Memory is not pinned. ``tensor.device`` is the CPU.

    Args:
        capability: what ``torch.cuda.get_device_capability()`` says.

    >>> with redirect_cuda():
    ...     torch.ones(2, device="cuda").cuda(), torch.device("cuda"), torch.nn.Linear(2, 2).to("cuda").weight.device
    (tensor([1., 1.]), device(type='cpu'), device(type='cpu'))
    """
    with _replacements.active(capability), _CudaIsCpu():
        yield


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
    """A stream or an event that has nothing to wait for. Its methods return itself, which is true.

    >>> Idle().query().wait().elapsed_time(Idle())
    0.0
    """

    device = _CPU

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def elapsed_time(self, end: object) -> float:
        """No milliseconds."""
        return 0.0


def _answer(value: Any) -> Callable[..., Any]:
    def answer(before: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _capability(before: Any, *args: Any, **kwargs: Any) -> Any:
    return _replacements.setting


def _default_device(before: Any, device: Any) -> Any:
    return before(_CPU if _names_cuda(device) else device)


def _functions() -> Mapping[tuple[Any, str], Callable[..., Any]]:
    """What the functions of ``torch.cuda`` answer, and :func:`torch.set_default_device`."""
    answers: dict[str, Any] = {
        "current_device": 0,
        "set_device": None,
        "_exchange_device": 0,  # of `with torch.cuda.device(1):`
        "_maybe_exchange_device": 0,
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "is_bf16_supported": True,
        "ipc_collect": None,
        "init": None,
        "Stream": Idle(),
        "Event": Idle(),
        "current_stream": Idle(),
        "default_stream": Idle(),
        "set_stream": None,
        "get_device_name": "NVIDIA GPU",
    }
    functions: dict[tuple[Any, str], Callable[..., Any]] = {
        (torch.cuda, name): _answer(value) for name, value in answers.items() if hasattr(torch.cuda, name)
    }
    functions[torch.cuda, "get_device_capability"] = _capability
    functions[torch, "set_default_device"] = _default_device
    return functions


_replacements: Replacements[tuple[int, int]] = Replacements(_functions)


# --- the optimizers' default ---


@contextlib.contextmanager
def foreach_as_on_cuda() -> Iterator[None]:
    """Let optimizers and ``clip_grad_norm_`` treat fake parameters of the CPU as they treat CUDA's, in this thread.

    On CUDA an optimizer whose ``foreach`` is None works on all parameters at once, which is faster and needs more
    memory during the step. On the CPU it works on one parameter after the other.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode(), foreach_as_on_cuda():
    ...     weight = torch.nn.Parameter(torch.ones(2))
    ...     adam = torch.optim.AdamW([weight])
    ...     weight.sum().backward()
    ...     adam.step()  # calls torch._foreach_addcdiv_ and others
    """
    with _foreach.active(True), _fake_types():
        yield


def _with_cpu(before: Any) -> Any:
    return [*before(), "cpu"]


_foreach: Replacements[bool] = Replacements(lambda: {(optimizer, "_get_foreach_kernels_supported_devices"): _with_cpu})


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
