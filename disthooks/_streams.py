"""Streams and events of whatever accelerator there is, by torch's generic names: CUDA, ROCm, XPU, ...

What is ordered on streams goes through here, so nothing else in the house says ``torch.cuda`` about that. The current
stream is asked for at each use: engines change it (FSDP2 runs parts of a forward on its own), and a remembered one
orders the wrong work.
"""

from __future__ import annotations

import functools

import torch

from disthooks.errors import AttachError


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lives on a device that runs behind the host, on streams.

    >>> on_accelerator(torch.ones(1))
    False
    """
    return not tensor.is_cpu and is_accelerator(tensor.device)


def is_accelerator(device: torch.device) -> bool:
    """The same of a device; False for ``cpu`` and ``meta``."""
    if device.type in ("cpu", "meta"):
        return False
    return _is_accelerator(device.type)


@functools.cache  # asked for every saved tensor
def _is_accelerator(kind: str) -> bool:
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == kind


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread now works on."""
    stream: torch.Stream = torch.accelerator.current_stream(device)
    return stream


def new_stream(device: torch.device) -> torch.Stream:
    """A stream beside the others; make it the current one by :func:`on`."""
    return torch.Stream(device)


def on(stream: torch.Stream) -> torch.Stream:
    """A context manager inside which this thread works on ``stream``.

    It is an object of its own for the same stream: one that is entered already, by this thread or another, cannot be
    entered again (pytorch#176560).
    """
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def work_for(device: torch.device) -> None:
    """Have this thread, which is one of our own, be on ``device`` from now on.

    A thread begins on the first device. When it waits for another, or lets go of an event there, CUDA goes back to the
    first and makes a context on it: hundreds of MB, for each process of the node.
    """
    if torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device)


def event_on(stream: torch.Stream, timed: bool = False) -> torch.Event:
    """What happens when all that ``stream`` was given so far is done."""
    event = torch.Event(stream.device, enable_timing=timed)
    event.record(stream)
    return event


#: Without it torch has nothing to ask.
_HAS_GRAPHS = torch.version.cuda is not None or torch.version.hip is not None


def capturing() -> bool:
    """Whether what this thread gives its current device is recorded in a graph, to be run again without Python.

    >>> capturing()
    False
    """
    # Asked without a driver, or in a fork, CUDA raises; who captures has used it in this process.
    return _HAS_GRAPHS and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def is_capturing(device: torch.device) -> bool:
    """The same of ``device``; False where there are no graphs."""
    return device.type == "cuda" and capturing()


def used_on(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Once ``tensor`` is freed, have its memory used again only after what ``stream`` was given until then.

    For memory that was allocated on ``stream`` that is so anyway, and allocators do nothing. Who frees memory of which
    it is not known has it be right by this, at the price of a look at an event when it is freed.
    """
    tensor.record_stream(stream)


def handed_over(tensor: torch.Tensor, made_on: torch.Stream) -> torch.Tensor:
    """``tensor``, which was filled in the order of ``made_on``, for what the current stream is given from now on."""
    stream = current_stream(tensor.device)
    if stream != made_on:
        stream.wait_event(event_on(made_on))
        used_on(tensor, stream)
    return tensor


def refuse_capture(who: str, instead: str) -> None:
    """Nothing, or an error while a graph is captured.

    Args:
        who: what would not run when the graph is replayed.
        instead: what to do.

    Raises:
        AttachError: a replay runs no Python: copies would go to and from memory that is somebody else's by then, and
            nothing would be counted or decided.
    """
    if capturing():
        raise AttachError(
            f"{who}: a CUDA graph is being captured (torch.cuda.graph, make_graphed_callables), and its replays run no "
            f"Python, so the hooks would act in the capture and never again; {instead}"
        )


def stream_of(tensor: torch.Tensor) -> torch.Stream | None:
    """The stream that this thread now works on, of the accelerator that ``tensor`` is on, if it is on one.

    >>> stream_of(torch.ones(1)) is None
    True
    """
    return current_stream(tensor.device) if on_accelerator(tensor) else None
