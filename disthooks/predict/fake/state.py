"""``state_put_back``: what code changes of this process while it is predicted is put back at the end."""

# [Note: one prediction at a time]
# A prediction runs the user's own code, which may change switches that belong to the whole process: the seed, the
# default dtype, the environment, the deterministic mode. It also puts functions of its own in the place of torch's. If
# two threads did both at once, each would take what the other one changed for the state of before, and the process
# would keep a part of it for ever. So one thread predicts at a time, and others wait. A lock of a prediction is held
# for many seconds, so `os.fork` does not wait for it: a child process gets a new one.
#
# Other threads go on meanwhile: they may train. A function that stands in for torch's does what torch does when another
# thread calls it.

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from disthooks._locks import new_lock

#: Variables that make libraries read files on this machine and ask no hub.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DIFFUSERS_OFFLINE": "1"}
_DEVICES = ("cpu", "cuda")

_turn = new_lock()


@contextlib.contextmanager
def state_put_back() -> Iterator[None]:
    """Inside, gradients are on, autocast is off, and libraries ask no hub. At the end the state of before is back.

    A second thread waits until the first one is through. See [Note: one prediction at a time].
    """
    with _turn, contextlib.ExitStack() as stack:
        for get, put_back in _switches():
            stack.callback(_put_back, get, put_back, get())
        stack.enter_context(_no_autocast())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        os.environ.update(_OFFLINE)
        yield


def _switches() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """A function that gives each part of the state, and one that puts it back."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    yield os.getcwd, os.chdir
    yield lambda: dict(os.environ), _put_back_environment
    yield random.getstate, random.setstate
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.random.get_state, numpy.random.set_state
    yield torch.get_rng_state, torch.set_rng_state
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _default_device, _put_back_default_device
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield _anomaly, lambda before: torch.autograd.set_detect_anomaly(*before)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        yield getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")
    for owner, name in ((cudnn, "benchmark"), (cudnn, "deterministic"), (cudnn, "enabled")):
        yield functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)
    for device in _DEVICES:
        yield (
            functools.partial(torch.is_autocast_enabled, device),
            functools.partial(torch.set_autocast_enabled, device),
        )
        yield functools.partial(torch.get_autocast_dtype, device), functools.partial(torch.set_autocast_dtype, device)
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled


def _put_back(get: Callable[[], Any], put_back: Callable[[Any], Any], before: Any) -> None:
    """Put a part of the state back. A switch is set only if it has changed.

    After ``torch.backends.disable_global_flags()`` torch refuses to set a flag, even to the value that it has.
    """
    if type(before) not in (bool, int, str) or get() != before:
        put_back(before)


def _put_back_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _default_device() -> Any:
    """The device that ``torch.set_default_device`` was given; None if it was not called."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _put_back_default_device(before: Any) -> None:
    if _default_device() != before:
        torch.set_default_device(before)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Leave the user's autocast region. Inside, torch drops the copies of weights when a region of its own ends."""
    depth: int = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    for device in _DEVICES:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of ``owner`` inside, for this thread. A function that was inherited is inherited again.

    Open it inside :func:`state_put_back`. See [Note: one prediction at a time].
    """
    original, thread = getattr(owner, name), threading.get_ident()
    own = vars(owner).get(name)  # as it is there: a static method, not its function

    def call(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == thread else original)(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own is not None:
            setattr(owner, name, own)
        else:
            delattr(owner, name)
