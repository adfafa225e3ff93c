"""Streams and events of any accelerator (CUDA, ROCm, XPU, ...), by torch's generic names.

All code that orders work on streams uses these functions, so that no other file names ``torch.cuda`` for it. The
current stream is asked for at each use, because engines change it: FSDP2 runs parts of a forward on streams of its own.
A stream that was remembered from an earlier use would order the wrong work.
"""

from __future__ import annotations

import functools

import torch

from disthooks import _torch
from disthooks.errors import AttachError


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is on a device that works on streams, behind the host.

    >>> on_accelerator(torch.ones(1))
    False
    """
    return not tensor.is_cpu and is_accelerator(tensor.device)


@functools.cache  # every saved tensor asks for it
def is_accelerator(device: torch.device) -> bool:
    """Whether ``device`` works on streams; False for ``meta``."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def current_stream(device: torch.device) -> torch.Stream:
    # With an index torch need not ask which accelerator there is.
    stream: torch.Stream = torch.accelerator.current_stream(device if device.index is None else device.index)
    return stream


def new_stream(device: torch.device) -> torch.Stream:
    """A new stream of ``device``. It becomes the current stream inside :func:`on`."""
    return torch.Stream(device)


def on(stream: torch.Stream) -> torch.Stream:
    """A context manager: inside it, ``stream`` is the current stream of this thread.

    It is a new object for the same stream. A stream object can be entered only once at a time, and another thread, or
    this one, may have entered ``stream`` itself (pytorch#176560).
    """
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def work_for(device: torch.device) -> None:
    """Make ``device`` the current device of this thread. Only threads that disthooks has started may call this.

    A new thread has the first device as its current device. When such a thread waits for another device or frees an
    event of it, CUDA then returns to the first device and makes a context there. The context takes hundreds of MB of
    that device's memory, once for each process of the node.
    """
    if torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device)


def event_on(stream: torch.Stream, timed: bool = False) -> torch.Event:
    """An event that happens when all work that is now queued on ``stream`` is done."""
    event = torch.Event(stream.device, enable_timing=timed)
    event.record(stream)
    return event


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and _torch.capturing()


def used_on(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Tell the allocator that ``stream`` uses ``tensor``.

    After ``tensor`` is freed, the allocator reuses its memory only when all work that was queued on ``stream`` until
    then is done. If the memory was allocated on ``stream``, the allocator waits anyway, and this call does nothing.
    Otherwise it costs one query of an event after ``tensor`` is freed. So call it also if it is not known on which
    stream the memory was allocated.
    """
    tensor.record_stream(stream)


def handed_over(tensor: torch.Tensor, made_on: torch.Stream) -> torch.Tensor:
    """``tensor``, ready for use on the current stream: work queued there from now on waits until it is filled."""
    stream = current_stream(tensor.device)
    if stream != made_on:
        stream.wait_event(event_on(made_on))
        used_on(tensor, stream)
    return tensor


def refuse_capture(who: str, instead: str) -> None:
    """Raise an error if a CUDA graph is being captured now.

    Raises:
        AttachError: if a graph is being captured. A replay runs no Python. It would copy to and from memory that other
            tensors use by then, and it would count and decide nothing.
    """
    if _torch.capturing():
        raise AttachError(
            f"{who}: a CUDA graph is being captured (torch.cuda.graph, make_graphed_callables). Its replays run no "
            f"Python, so the hooks would act during the capture and never again; {instead}"
        )


def stream_of(tensor: torch.Tensor) -> torch.Stream | None:
    """The current stream of the device of ``tensor``; None if that device has no streams.

    >>> stream_of(torch.ones(1)) is None
    True
    """
    return current_stream(tensor.device) if on_accelerator(tensor) else None
