"""Attaching to a module: while it is attached, the ``__call__`` of its class opens hooks at the module's site."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.utils.parametrize
from torch import nn

from disthooks._locks import new_lock
from disthooks._torch import forget_compiled, uncompiled
from disthooks.errors import AttachError
from disthooks.saved.hooks import HookSite
from disthooks.saved.when_to_hook import nothing_to_hook

# [Note: the class's own call]
# `model(x)` calls `type(model).__call__`, and nothing that is set on the module itself comes before that. An attached
# module keeps its class, so `type(m) is nn.Linear` stays true. What changes is the function `__call__` in the class's
# own dictionary, as long as a module of this class is attached: it asks the module for its site and opens hooks there.
# A module without a site, in any model, is called as before. Other ways to open hooks have these faults:
#   * A pair of forward hooks leaves our hooks on when forward is interrupted, and `module.compile()` compiles it too.
#   * A function on the instance, also torch's `_compiled_call_impl`, has the original's parameters in a replica of
#     DataParallel, and an outer torch.compile does not see it.
#   * A subclass for the module changes `type()`: initialisers, registries and quantization miss the module silently.
#   * `nn.Module.__call__` itself, replaced, slows down every module and turns off a shortcut of the compiler's.
# Several classes in one line of descent may be changed at once, as when `fully_shard` derives from a changed class.
# The site says whose function opens it, so that hooks open once. The compiler does not guard the functions of a
# class: what it compiled before is forgotten when a class is changed, and traced again.

_SITE = "_disthooks_site"  # the key of an attached module's site in its __dict__; in the class it is None

_lock = new_lock()
_openers: weakref.WeakSet[_Opener] = weakref.WeakSet()  # of the classes that are changed now


class _ModuleSite(HookSite):
    """The site of one module. A copy of the module, however it is made, gets None in its place (decision 19)."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    """Gives a copy of a module None as its site."""


def site_of(module: nn.Module) -> HookSite | None:
    return cast("HookSite | None", module.__dict__.get(_SITE))


def exchange_site(module: nn.Module, site: HookSite) -> HookSite:
    """Open hooks at ``site`` in the calls of ``module``, which is attached, and return the site that it had."""
    before = cast(HookSite, site_of(module))
    module.__dict__[_SITE] = _ModuleSite(*site._replace(openers=before.openers))
    return before


def refusal(module: nn.Module) -> str | None:
    """Why hooks cannot open around the calls of ``module``, or None when they can."""
    if isinstance(module, torch.fx.GraphModule):
        return "a GraphModule makes its class anew when it is recompiled"
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted module runs without Python hooks"
    for kind in _classes(module):
        own = kind.__dict__.get("__call__")
        if own is not None and not isinstance(own, types.FunctionType):
            return f"{kind.__name__}.__call__ is not a function"
    return None


def attach(sites: Iterable[tuple[nn.Module, HookSite]]) -> None:
    """Open hooks around the calls of each module, at its site. After an AttachError none is attached."""
    with _lock:
        sites = list(sites)
        openers: dict[type[nn.Module], _Opener] = {}
        try:
            for kind in dict.fromkeys(kind for module, _ in sites for kind in _classes(module)):
                found = getattr(kind.__dict__.get("__call__"), "_disthooks_opener", None)  # a module of it is attached
                openers[kind] = found if isinstance(found, _Opener) else _Opener(kind)
        except BaseException:
            _restore_unused()
            raise
        for module, site in sites:
            own = tuple(openers[kind] for kind in _classes(module))
            for opener in own:
                opener.attached.add(module)
            module.__dict__[_SITE] = _ModuleSite(*site._replace(openers=own))


def detach(modules: Iterable[nn.Module]) -> None:
    """Open no hooks around the calls of ``modules`` any more. A class without attached modules is restored."""
    with _lock:
        for module in modules:
            site = module.__dict__.pop(_SITE, None)
            for opener in () if site is None else site.openers:
                opener.attached.discard(module)
        _restore_unused()


def _restore_unused() -> None:
    """Give each class without attached modules its own functions again. A module that was freed is not attached."""
    for opener in list(_openers):
        opener.restore_if_unused()


def _classes(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes whose ``__call__`` opens the hooks of ``module``: its own, and the later one of a lazy module."""
    kind = type(module)
    if torch.nn.utils.parametrize.is_parametrized(module) and len(kind.__bases__) == 1:
        return (kind.__bases__[0],)  # parametrize made the class for this module alone, and will remove it again
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.cls_to_become is not None:
        later = cast("type[nn.Module]", module.cls_to_become)
        return (later,) if issubclass(kind, later) else (kind, later)
    return (kind,)


class _Opener:
    """Changes one class while modules of this class are attached. See [Note: the class's own call]."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        call = _call(kind, self)
        call.__dict__["_disthooks_opener"] = self
        ours = {
            _SITE: None,  # for modules that are not attached: the compiler guards an attribute, but no missing key
            "__call__": call,
            "__reduce_ex__": _reduce(kind),
            "__prepare_scriptable__": _prepare_scriptable(kind),
        }
        self._kind = kind
        self._ours: dict[str, Any] = {}  # the attributes that the class was given so far
        self._own = {name: kind.__dict__[name] for name in ours if name in kind.__dict__}
        try:
            for name, value in ours.items():
                setattr(kind, name, value)
                self._ours[name] = value
        except Exception as error:  # whatever a metaclass raises
            self.restore_if_unused()
            raise AttachError(
                f"{kind.__name__} lets nobody change its functions ({type(error).__name__}: {error}); wrap it instead: "
                "SaveWith(module, ...)"
            ) from error
        _openers.add(self)
        forget_compiled()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Opener:
        return self

    def restore_if_unused(self) -> None:
        """Give the class its own functions again, once no module is attached."""
        if self.attached:
            return
        for name in ("__reduce_ex__", "__prepare_scriptable__", "__call__", _SITE):
            if name not in self._ours:
                continue
            value = self._ours[name]
            if name not in self._kind.__dict__ or self._kind.__dict__[name] is not value:
                if name == "__call__":
                    return  # somebody else has replaced our function since and may call it, so it has to stay
            elif name in self._own:
                setattr(self._kind, name, self._own[name])
            else:
                delattr(self._kind, name)
        _openers.discard(self)


def _call(kind: type[nn.Module], opener: _Opener) -> Callable[..., Any]:
    own = kind.__dict__.get("__call__")  # see [Note: the class's own call]

    @uncompiled(callees=False)
    def inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: HookSite | None = getattr(self, _SITE, None)
        if site is None or opener not in site.openers or nothing_to_hook():
            return super(kind, self).__call__(*args, **kwargs)
        return site.call(self, super(kind, self).__call__, *args, **kwargs)

    if own is None:
        return inherited

    @uncompiled(callees=False)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: HookSite | None = getattr(self, _SITE, None)
        if site is None or opener not in site.openers or nothing_to_hook():
            return own(self, *args, **kwargs)
        return site.call(self, own, self, *args, **kwargs)

    return replaced


def _reduce(kind: type[nn.Module]) -> Callable[..., Any]:
    own = kind.__dict__.get("__reduce_ex__")

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Return the value of the plain module, so that a copy or a pickle has no state of ours (decision 96)."""
        given = super(kind, self).__reduce_ex__(protocol) if own is None else own(self, protocol)
        if isinstance(given, str) or len(given) < 3 or not isinstance(given[2], dict) or _SITE not in given[2]:
            return given
        state = {key: value for key, value in given[2].items() if key != _SITE}
        return (*given[:2], state, *given[3:])

    return reduce


def _prepare_scriptable(kind: type[nn.Module]) -> Callable[..., Any]:
    own = kind.__dict__.get("__prepare_scriptable__")

    def prepare(self: nn.Module) -> Any:
        """``torch.jit.script`` calls this to get the module that it compiles in place of this one. Count that call."""
        site = site_of(self)
        if site is not None:
            site.pipeline.counters.count_pass("torch.jit.script", site.name)
        inherited = getattr(super(kind, self), "__prepare_scriptable__", None) if own is None else own.__get__(self)
        return self if inherited is None else inherited()

    return prepare
