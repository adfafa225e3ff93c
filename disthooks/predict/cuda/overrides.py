"""Kernels and functions of ours that take the place of torch's for a while, in the threads that asked for them."""

# [Note: kernels of one thread]
# A `TorchFunctionMode` sees a call only where Python calls torch. `F.instance_norm` calls batch norm from C++, and the
# mode is off inside `F.multi_head_attention_forward`. A kernel in torch's dispatcher is called from everywhere. The
# dispatcher belongs to the process, so a kernel asks whether its thread has asked for it, and does what torch does
# otherwise. The kernels are registered when the first thread asks, and taken away when the last one leaves; torch's own
# kernels are under them all the time. A function in a module of torch is replaced in the same way.

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from disthooks._locks import new_lock

_S = TypeVar("_S")

#: Called with the setting of the thread (None if it has none), the operator, the dispatch keys of the call, and the
#: arguments of the operator.
Kernel = Callable[..., Any]


class _Shared(Generic[_S]):
    """Something of the process that is changed while a thread asks for it; see [Note: kernels of one thread]."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._thread = threading.local()
        self._users = 0

    def _install(self) -> None:
        raise NotImplementedError

    def _remove(self) -> None:
        raise NotImplementedError

    @property
    def setting(self) -> _S | None:
        """What this thread asked for last; None outside of ``active``."""
        settings: list[_S] = self._thread.__dict__.get("settings", [])
        return settings[-1] if settings else None

    @contextlib.contextmanager
    def active(self, setting: _S) -> Iterator[None]:
        """Change it for this thread. ``setting`` says how."""
        with self._lock:
            if self._users == 0:
                self._install()
            self._users += 1
        settings = self._thread.__dict__.setdefault("settings", [])
        settings.append(setting)
        try:
            yield
        finally:
            settings.pop()
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._remove()


class Overrides(_Shared[_S]):
    """Kernels for operators of aten at one dispatch key; see [Note: kernels of one thread].

    ``kernels`` gives them by the name of the operator without ``aten::``. ``others`` gives kernels for other dispatch
    keys, by name and key: they are called with the operator's arguments alone, in every thread.
    """

    def __init__(
        self,
        key: str,
        kernels: Callable[[], Mapping[str, Kernel]],
        others: Callable[[], Mapping[tuple[str, str], Callable[..., Any]]] = dict,
    ) -> None:
        super().__init__()
        self._key, self._kernels, self._others = key, kernels, others
        self._library: Any = None

    def _install(self) -> None:
        kernels, others = self._kernels(), self._others()  # they look at what is registered
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*verrid")
                for name, kernel in kernels.items():
                    library.impl(name, self._bound(_operator(name), kernel), self._key, with_keyset=True)
                for (name, key), function in others.items():
                    library.impl(name, function, key)
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        library, self._library = self._library, None
        library._destroy()

    def _bound(self, operator: Any, kernel: Kernel) -> Callable[..., Any]:
        def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
            return kernel(self.setting, operator, keys, *args, **kwargs)

        return call


class Replacements(_Shared[_S]):
    """Functions that stand under the names of others; see [Note: kernels of one thread].

    ``functions`` gives them by the object that has the attribute, and its name. The first argument of each is the
    function that it replaces.
    """

    def __init__(self, functions: Callable[[], Mapping[tuple[Any, str], Callable[..., Any]]]) -> None:
        super().__init__()
        self._functions = functions
        self._before: list[tuple[Any, str, Any]] = []

    def _install(self) -> None:
        for (owner, name), function in self._functions().items():
            before = getattr(owner, name)
            self._before.append((owner, name, before))
            setattr(owner, name, self._bound(before, function))

    def _remove(self) -> None:
        while self._before:
            setattr(*self._before.pop())

    def _bound(self, before: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(before, *args, **kwargs) if self.setting is not None else before(*args, **kwargs)

        # Modules that are imported meanwhile may use a class in an annotation, or derive from it: it stays a class.
        if isinstance(before, type):
            kind: Any = _Called
            if type(before) is not type:  # it has a class of its own, as those of torch's C++ have
                kind = type("_Called", (_Called, type(before)), {})
            made: Callable[..., Any] = kind(
                before.__name__, (before,), {"_call": staticmethod(call), "_before": before}
            )
            return made
        return call


class _Called(type):
    """A class that calls a function to make its objects. Classes that derive from it are made as before."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_call" not in vars(cls):
            return super().__call__(*args, **kwargs)
        return vars(cls)["_call"].__func__(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls._before) if "_before" in vars(cls) else super().__instancecheck__(value)  # type: ignore[attr-defined]


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def has_operator(name: str) -> bool:
    return torch._C._dispatch_has_kernel(f"aten::{name}")


def has_kernel(name: str, key: str) -> bool:
    """Whether this torch has a kernel for the operator ``aten::name`` at ``key`` itself."""
    return has_operator(name) and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def original(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch's kernel of an operator that is composed of other operators."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def below(operator: Any, keys: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel of ``operator`` that comes after ``key``. The operators that it calls see ``key`` again."""
    return operator.redispatch(keys.remove(key), *args, **kwargs)
