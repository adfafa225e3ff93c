"""The class that an attached module has: one cached subclass for each class, with its name."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.utils.parametrize
from torch import nn

from disthooks._locks import Order, shared
from disthooks._torch import uncompiled
from disthooks.errors import AttachError
from disthooks.saved.entry import nothing_to_hook
from disthooks.saved.site import Site

_SITE = "_disthooks_site"  # where an attached module's site is, in its __dict__
_PLAIN = "_disthooks_plain"  # on the subclass: the class it stands for

_lock = shared(Order.CLASSES)
_derived: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()
_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # attachments that need the class


class _Here(Site):
    """The site of one module, which a copy of the module does not have, however it was made."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    """The site of a copy."""


def site_of(module: nn.Module) -> Site | None:
    """Where the hooks of ``module`` open, if it is attached."""
    return cast("Site | None", module.__dict__.get(_SITE))


def open_at(module: nn.Module, site: Site | None) -> None:
    """Have the calls of ``module``, whose class was swapped, open hooks at ``site``; or none any more."""
    if site is None:
        module.__dict__.pop(_SITE, None)
    else:
        module.__dict__[_SITE] = _Here(*site)


def plain(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that ``kind`` stands for, or itself."""
    return cast("type[nn.Module]", kind.__dict__.get(_PLAIN, kind))


def refusal(module: nn.Module) -> str | None:
    """Why ``module`` cannot change its class, or None when it can."""
    if isinstance(module, torch.fx.GraphModule):
        return "a GraphModule makes its class anew when it is recompiled"
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted module runs without Python hooks"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "a lazy module changes its class when it materialises; run it once first"
    return None


def swap(modules: Iterable[nn.Module]) -> None:
    """Give ``modules`` the subclasses of their classes; all or, after an AttachError, none."""
    with _lock:
        modules = list(modules)
        # fully_shard or parametrize may have derived from ours. All are made before any is used.
        fresh = [m for m in modules if not any(_PLAIN in kind.__dict__ for kind in type(m).__mro__)]
        made = [(module, _subclass(_movable(module))) for module in fresh]
        for module, kind in made:
            if _is_parametrized(module):
                type(module).__bases__ = (kind,)
            else:
                module.__class__ = kind
        for module in modules:
            _users[module] = _users.get(module, 0) + 1


def put_back(modules: Iterable[nn.Module]) -> None:
    """Give those of ``modules`` that no attachment needs any more their own classes again."""
    with _lock:
        for module in modules:
            _users[module] = _users.get(module, 1) - 1
            if _users[module] > 0:
                continue
            del _users[module]
            kind = type(module)
            if _PLAIN in kind.__dict__:
                module.__class__ = plain(kind)
            elif _is_parametrized(module) and not any(type(other) is kind for other in _users):
                # A deepcopy of a parametrized module has the same class; it was the last one that needs it.
                kind.__bases__ = (plain(kind.__bases__[0]), *kind.__bases__[1:])


def _is_parametrized(module: nn.Module) -> bool:
    """Whether ``module`` has a class of its own, made by parametrize, which edits it later: ours goes under it."""
    return torch.nn.utils.parametrize.is_parametrized(module)


def _movable(module: nn.Module) -> type[nn.Module]:
    kind = type(module)
    return kind.__bases__[0] if _is_parametrized(module) else kind


def _subclass(kind: type[nn.Module]) -> type[nn.Module]:
    """The one subclass that stands for ``kind``."""
    found = _derived.get(kind)
    if found is None:
        try:
            found = _derived[kind] = _derive(kind)
        except Exception as error:  # whatever an __init_subclass__ or a metaclass raises
            raise AttachError(
                f"{kind.__name__} cannot be derived from ({type(error).__name__}: {error}); wrap it instead: "
                "SaveWith(module, ...)"
            ) from error
    return found


def _derive(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that opens the hooks around a call where there is a site, and is not to be told from ``kind``."""

    @uncompiled(callees=False)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        site: Site | None = self.__dict__.get(_SITE)
        if site is None or nothing_to_hook():
            return kind.__call__(self, *args, **kwargs)
        return site.call(self, kind.__call__, self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Copies and pickles are of the plain class, without state of ours."""
        given = kind.__reduce_ex__(self, protocol)
        if isinstance(given, str):
            return given
        made: list[Any] = [kind if part is own else part for part in given]
        made[1] = tuple(kind if part is own else part for part in made[1])
        if made[0] is copyreg.__newobj__ and made[1] == (kind,):  # type: ignore[attr-defined]
            # The pickler insists that __newobj__ makes the object's own class; this one makes any.
            made[:2] = [copyreg._reconstructor, (kind, object, None)]  # type: ignore[attr-defined]
        if len(made) > 2 and isinstance(made[2], dict):
            made[2] = {key: value for key, value in made[2].items() if key != _SITE}
        return tuple(made)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own = type(kind.__name__, (kind,), {**names, _PLAIN: kind, "__call__": call, "__reduce_ex__": reduce})
    return own
