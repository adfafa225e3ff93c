"""Streams and events of whatever accelerator there is, by torch's generic names: CUDA, ROCm, XPU, ...

All that is asynchronous goes through here, so nothing else in the house says ``torch.cuda`` about it. The current
stream is asked for at each use: engines change it (FSDP2 runs parts of a forward on its own), and a remembered one
orders the wrong work.
"""

from __future__ import annotations

from typing import Any

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
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread now works on."""
    stream: torch.Stream = torch.accelerator.current_stream(device)
    return stream


def new_stream(device: torch.device) -> torch.Stream:
    """A stream beside the others; use it as a context manager."""
    return torch.Stream(device)


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
    ask: Any = torch.cuda.is_current_stream_capturing
    return _HAS_GRAPHS and bool(ask())


def is_capturing(device: torch.device) -> bool:
    """The same of ``device``; False for what has no graphs."""
    return device.type == "cuda" and capturing()


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
