"""What can go wrong in a store or in a step, on request; and which memory is still in use."""

from __future__ import annotations

import dataclasses
import gc
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import disthooks as dh
from disthooks._torch import StorageRef
from disthooks.errors import StoreError
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores.base import Store
from tests.support.stores.copies import Copies
from tests.support.switch import KIND


class AsAsked(Exception):
    """Raised on request."""


def interrupt(*_: object) -> None:
    """Ctrl-C, for real."""
    signal.raise_signal(signal.SIGINT)


def fail(*_: object) -> None:
    raise AsAsked


@dataclasses.dataclass(frozen=True)
class Faulty(Store):
    """Another store, whose n-th ``put`` or ``get`` calls ``then`` instead."""

    inner: Store
    put_at: int = -1
    get_at: int = -1
    then: Callable[[], Any] = fail
    counts: dict[str, int] = dataclasses.field(default_factory=lambda: {"put": 0, "get": 0})

    def put(self, tensor: torch.Tensor) -> Any:
        self.counts["put"] += 1
        return self.then() if self.counts["put"] == self.put_at else self.inner.put(tensor)

    def get(self, ticket: Any) -> torch.Tensor:
        self.counts["get"] += 1
        return self.then() if self.counts["get"] == self.get_at else self.inner.get(ticket)

    def drop(self, ticket: Any) -> None:
        self.inner.drop(ticket)

    def wait(self) -> None:
        self.inner.wait()


def line(kind: str, folder: object, **faults: Any) -> tuple[Any, Callable[[], int]]:
    """A pipeline of this kind of store for tensors of every size, with faults, and the bytes that its store holds."""
    store: Any = dh.OnDisk(folder) if kind == "disk" else Copies()
    faulty = Faulty(store, **faults) if faults else store
    if kind == "functions":
        return dh.Functions(faulty.put, faulty.get), lambda: 0
    return pipeline(faulty, at_least=0), lambda: store.budget.held


def full() -> Any:
    raise StoreError("full")


class Watch(TorchDispatchMode):
    """Remembers, weakly, the memory that any operator makes, and not that of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            # On a device the device's alone: page-locked memory is a pool's, which keeps it for the next tensors.
            here = isinstance(tensor, torch.Tensor) and tensor.device.type == KIND
            if here and tensor.untyped_storage()._cdata not in given:
                self.made.append(StorageRef(tensor.untyped_storage()))
        return result

    def alive(self) -> int:
        """Bytes of what is left of it."""
        storages = {ref.address: ref.get() for ref in self.made}
        return sum(storage.nbytes() for storage in storages.values() if storage is not None)


def soon(what: Callable[[], bool]) -> bool:
    """Whether ``what`` comes true within a minute: a thread may be writing in this moment."""
    end = time.monotonic() + 60
    while not what() and time.monotonic() < end:
        time.sleep(0.005)
    return what()


def left(*amounts: Callable[[], int]) -> tuple[int, ...]:
    """The amounts; of a device's, those that are left within seconds.

    A thread of autograd's own lets go of a graph there after the backward has raised, and a copy may be under way.
    """
    if KIND != "cpu":
        soon(lambda: not any(amount() for amount in amounts))
    return tuple(amount() for amount in amounts)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts alone must do; what torch imports in its first backward leaves a cycle once."""
    with Watch():
        torch.ones(1, requires_grad=True).exp().backward()
    gc.disable()
    yield
    gc.enable()


class suppressed:
    """Expect one of ``kinds``, and keep nothing of it: a traceback holds what its frames hold.

    It is no generator: that of Python 3.13 keeps the frame that raised until garbage is collected.
    """

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            pytest.fail(f"none of {self._kinds} was raised")
        return issubclass(kind, self._kinds)
