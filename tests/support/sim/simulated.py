"""A simulated accelerator, ``torch.device("sim")``: what is wrong on the streams of a real one goes wrong here too.

Device memory is host memory, but streams are threads that do their work later than they are given it, copies hold raw
pointers, and freed memory is overwritten. So an event that nobody waits for, or a tensor that is freed before its copy
is done, gives wrong numbers. Right programs get the CPU's numbers, bit for bit.

``load()`` compiles it (g++ and torch's own headers; kept in ``build/``) and registers it as torch's accelerator. It has
to come before the first backward of the process: autograd starts its device threads then, for the devices there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.support import ROOT

HERE = pathlib.Path(__file__).parent
SOURCES = ("simulated.cpp", "copies.h", "runtime.h", "memory.h", "streams.h")

#: What is counted, in the order of ``enum Count`` of streams.h.
COUNTS = (
    "stream_waits",
    "event_waits",
    "device_waits",
    "operator_waits",
    "to_host_async",
    "to_host_blocking",
    "to_device_async",
    "to_device_staged",
    "to_device_blocking",
    "on_device",
    "between_devices",
    "to_host_async_bytes",
    "to_host_blocking_bytes",
    "to_device_async_bytes",
    "to_device_staged_bytes",
    "to_device_blocking_bytes",
    "on_device_bytes",
    "between_devices_bytes",
    "operators",
    "operators_ahead",
)

#: Counts of the host's own waiting.
WAITS = ("stream_waits", "event_waits", "device_waits", "operator_waits", "to_host_blocking", "to_device_blocking")


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def folder() -> pathlib.Path:
    """Where libraries are kept: ``DISTHOOKS_SIM_CACHE``, or ``build/sim`` beside the tests."""
    return pathlib.Path(os.environ.get("DISTHOOKS_SIM_CACHE") or ROOT / "build" / "sim").absolute()


def command(target: pathlib.Path) -> list[str]:
    """How the library is compiled."""
    there = pathlib.Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = ["-std=c++20", abi, "-O1", "-fPIC", "-shared", "-w", "-I", str(there / "include")]
    libraries = ["-L", str(there / "lib"), "-ltorch_cpu", "-lc10", "-lpthread"]
    return [compiler() or "g++", *flags, str(HERE / SOURCES[0]), *libraries, "-o", str(target)]


def built() -> pathlib.Path:
    """The compiled library; processes that want it at once wait for the one that compiles it.

    Raises:
        RuntimeError: it does not compile.
    """
    import fcntl

    text = b"".join((HERE / name).read_bytes() for name in SOURCES)
    key = hashlib.sha256(text + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    library = folder() / f"simulated-{key}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(f".{os.getpid()}")
            done = subprocess.run(command(part), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the simulated accelerator does not compile:\n{done.stderr[-4000:]}")
            part.rename(library)
    return library


def module(library: ctypes.CDLL) -> types.ModuleType:
    """``torch.sim``: what torch asks a device's module for."""
    made: Any = types.ModuleType("torch.sim")
    made._is_in_bad_fork = lambda: bool(library.sim_forked())
    made.is_available = lambda: True
    made.is_initialized, made._initialized = (lambda: True), True
    made._lazy_init = lambda: None
    made.device_count = lambda: 2
    made.current_device = torch.accelerator.current_device_index
    made.set_device = torch.accelerator.set_device_index
    made.current_stream = torch.accelerator.current_stream
    made.synchronize = torch.accelerator.synchronize
    made.device = lambda device: torch.accelerator.device_index(torch.device("sim", _index(device)).index)
    made.Stream, made.Event = torch.Stream, torch.Event
    made.stream = lambda stream: stream
    made.manual_seed = lambda seed: torch.ops.sim.seed(_index(None), _signed(seed))
    made.manual_seed_all = lambda seed: [torch.ops.sim.seed(i, _signed(seed)) for i in range(2)]
    made.get_rng_state = lambda device=None: torch.ops.sim.get_rng_state(_index(device))
    made.set_rng_state = lambda state, device=None: torch.ops.sim.set_rng_state(_index(device), state)
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    made.memory_allocated = torch.accelerator.memory_allocated
    made.max_memory_allocated = torch.accelerator.max_memory_allocated
    made.reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
    return made


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if index is None else index


def _signed(seed: int) -> int:
    """The integer of 64 bits with a sign that has the same bits: operators take no other."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


@functools.cache
def load() -> ctypes.CDLL:
    """Builds, loads and registers the device; once in a process."""
    library = ctypes.CDLL(str(built()))
    library.sim_delays.argtypes = [ctypes.c_double, ctypes.c_uint64]
    library.sim_hold.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.sim_open.argtypes = [ctypes.c_int64]
    library.sim_ahead.argtypes = [ctypes.c_int64]
    library.sim_capacity.argtypes = [ctypes.c_int64]
    library.sim_lag.argtypes = [ctypes.c_uint64]
    library.sim_log.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    for name in ("sim_hold", "sim_count", "sim_pinned_bytes", "sim_log"):
        getattr(library, name).restype = ctypes.c_int64
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return library


@functools.cache
def missing() -> str:
    """Why there is no simulated device; empty when there is one now."""
    if not compiler():
        return "no C++ compiler for the simulated device"
    try:
        load()
    except (RuntimeError, OSError) as error:
        return str(error)
    return ""


def capacity(nbytes: int) -> None:
    """From now on tensors may take so many bytes on each device; more is an ``OutOfMemoryError``."""
    load().sim_capacity(nbytes)


def delays(most_seconds: float = 100e-6, seed: int = 0) -> None:
    """From now on each item of a stream comes after a random delay of at most so long."""
    load().sim_delays(most_seconds, seed)


def poison(on: bool = True) -> None:
    """Whether memory that is freed is filled with NaN."""
    load().sim_poison(int(on))


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Inside, ``stream`` does nothing of what it is given from now on; an operator on it would never return."""
    gate = load().sim_hold(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        load().sim_open(gate)


FOR_EVER = 1 << 40  # events


@contextlib.contextmanager
def ahead(events: int = FOR_EVER) -> Iterator[None]:
    """Inside, the host runs ahead of the device: of the ``events`` that were recorded last a query says "not yet".

    The streams of this device are drained before each operator (but inside :func:`lag`), so without this the host is
    never far ahead. What the host waited for, be it one event, a stream or the device, is done all the same.
    """
    load().sim_ahead(events)
    try:
        yield
    finally:
        load().sim_ahead(0)


@contextlib.contextmanager
def lag(items: int = FOR_EVER) -> Iterator[None]:
    """Inside, operators are items of their stream too, as a GPU's are: the host may be ahead by a whole step.

    An operator reads device memory when its stream comes to it, so a missing wait gives wrong numbers, and a tensor
    that is freed too early is NaN. The host still waits where a GPU's does, and before operators whose shapes or random
    numbers are not known without computing (``counted()["operators_ahead"]`` says how many did not need that).

    Args:
        items: a query of an event or of a stream says "not yet" of the last so many items that the stream was given,
            though they may be done. What the host has waited for is done.
    """
    import torch._meta_registrations  # noqa: F401  the shapes of convolutions and norms

    load().sim_lag(items)
    try:
        yield
    finally:
        load().sim_lag(0)


class Counted(dict[str, int]):
    """What was counted, by the names in ``COUNTS``."""

    @property
    def waits(self) -> int:
        """How often the host waited for the device."""
        return sum(self[name] for name in WAITS)


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Counts what happens inside; the numbers are there once it is left."""
    library, result = load(), Counted()
    before = [library.sim_count(i) for i in range(len(COUNTS))]
    yield result
    result.update((name, library.sim_count(i) - before[i]) for i, name in enumerate(COUNTS))


@contextlib.contextmanager
def copies() -> Iterator[list[tuple[str, int]]]:
    """Logs the copies inside, in the order of calls: the name of each in ``COUNTS``, and its bytes."""
    library, result = load(), list[tuple[str, int]]()
    first = library.sim_log(1, (ctypes.c_int64 * 0)(), 0)
    yield result
    room = (ctypes.c_int64 * (1 << 20))()
    numbers = room[: library.sim_log(0, room, len(room))]
    result.extend((COUNTS[kind], nbytes) for kind, nbytes in zip(numbers[::2], numbers[1::2], strict=True))
    assert first == 0, "contexts that log do not nest"


def pinned_bytes() -> int:
    """Bytes of pinned memory in use."""
    return int(load().sim_pinned_bytes())
