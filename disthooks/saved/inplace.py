"""Attach to modules where they stand: no name, class name or ``state_dict`` key changes."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.utils.parametrize
from torch import nn

from disthooks._handles import Attachment
from disthooks._match import Pattern, match_modules
from disthooks.errors import AttachError
from disthooks.saved.frame import Frame, never_runs, why_not
from disthooks.saved.ledger import Ledger, SavedReport
from disthooks.saved.pipeline import Pipeline, Stage, pipeline

_SITE = "_disthooks_site"  # where an attached module's state is, in its __dict__
_PLAIN = "_disthooks_plain"  # on the subclass: the class it stands for


class _Site(NamedTuple):
    pipeline: Pipeline
    ledger: Ledger
    name: str


class Saving(Attachment):
    """What :func:`save_activations` attached."""

    def __init__(self, ledger: Ledger, names: tuple[str, ...]) -> None:
        super().__init__()
        self._ledger = ledger
        self.names = names

    def report(self) -> SavedReport:
        """Bytes stored, shared, kept and held under this attachment, on this rank."""
        return self._ledger.report()


def save_activations(model: nn.Module, patterns: Pattern | Iterable[Pattern], to: Stage | Pipeline) -> Saving:
    """Have what autograd saves in the forward of the matching modules go through ``to``.

    Attach before or after DDP, ``fully_shard`` or another engine takes the model. Names, class names,
    ``isinstance`` and ``state_dict`` keys stay; ``copy.deepcopy`` and pickles of the model are plain. A matching
    module inside another one that matches is covered by the outer one. A call under ``no_grad``, in a
    ``torch.func`` transform, while compiling, or inside a checkpointed region goes through without hooks and
    is counted in ``report().passed``.

    Args:
        model: the model, or a part of it.
        patterns: one or several of: a glob over the module's name (``*`` crosses dots), a module class, a
            predicate of name and module.
        to: a store, or a :func:`~disthooks.pipeline`.

    Returns:
        A handle with ``remove()`` and ``report()``; also a context manager.

    Raises:
        MatchError: when a pattern matches no module; the message lists near names.
        AttachError: when a module cannot take hooks in place (a ``GraphModule``, a lazy or scripted module, one
            that is attached already); the message names the remedy. Nothing is attached then.

    >>> from disthooks import OnDisk
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> with save_activations(model, nn.Linear, OnDisk("/tmp")) as saving:
    ...     model(torch.ones(32, 64)).sum().backward()
    >>> saving.names, saving.report().moved > 0, type(model[0]) is nn.Linear
    (('0', '2'), True, True)
    """
    line, ledger = pipeline(to), Ledger()
    chosen = _outermost(_running(match_modules(model, _listed(patterns))))
    for name, module in chosen:
        _refuse(name, module)
    saving = Saving(ledger, tuple(name for name, _ in chosen))
    classes = {_plain(type(module)) for _, module in chosen}
    # Wrap policies pick modules by class, and take the first one's: all of a class must stay of one class.
    alike = [part for part in model.modules() if _plain(type(part)) in classes and _refusal(part) is None]
    # fully_shard may have derived from ours. All are made before any is used: a class may refuse to be derived from.
    fresh = [part for part in alike if not any(_PLAIN in kind.__dict__ for kind in type(part).__mro__)]
    for module, kind in [(part, _derived(type(part))) for part in fresh]:
        module.__class__ = kind
    for name, module in chosen:
        module.__dict__[_SITE] = _Site(line, ledger, name)
    saving.on_remove(functools.partial(_detach, [module for _, module in chosen], alike))
    return saving


def _listed(patterns: Pattern | Iterable[Pattern]) -> list[Pattern]:
    one = isinstance(patterns, (str, type)) or callable(patterns)
    return [cast(Pattern, patterns)] if one else list(cast("Iterable[Pattern]", patterns))


def _running(matched: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Without the containers, which are never called themselves, and would stand for what is inside."""
    reasons = {name: never_runs(module) for name, module in matched}
    if all(reasons.values()):
        name, why = next(iter(reasons.items()))
        raise AttachError(f"{name or 'the model'!r}: {why}: {f'{name}.*'.lstrip('.')!r}")
    return [(name, module) for name, module in matched if not reasons[name]]


def _outermost(matched: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    inner = {part for _, module in matched for part in module.modules() if part is not module}
    return [(name, module) for name, module in matched if module not in inner]


def _plain(kind: type[nn.Module]) -> type[nn.Module]:
    return cast("type[nn.Module]", kind.__dict__.get(_PLAIN, kind))


def _derived(kind: type[nn.Module]) -> type[nn.Module]:
    try:
        return _subclass(cast(Hashable, kind))
    except Exception as error:  # whatever an __init_subclass__ or a metaclass raises
        raise AttachError(
            f"{kind.__name__} cannot be derived from ({type(error).__name__}: {error}); wrap it instead: "
            "SaveWith(module, ...)"
        ) from error


@functools.cache
def _subclass(kind: type[nn.Module]) -> type[nn.Module]:
    """The one subclass that stands for ``kind``: it opens the hooks around a call where there is state."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        site: _Site | None = self.__dict__.get(_SITE)
        if site is None:
            return kind.__call__(self, *args, **kwargs)
        reason = why_not()
        if reason is not None:
            if reason != "compiling":  # a lock is nothing to trace
                site.ledger.count_pass(reason)
            return kind.__call__(self, *args, **kwargs)
        with Frame(site.pipeline, site.ledger, site.name, self):
            return kind.__call__(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Copies and pickles are of the plain class, without state of ours."""
        made = list(cast("tuple[Any, ...]", kind.__reduce_ex__(self, protocol)))
        if made[0] is copyreg.__newobj__ and made[1][0] is own:  # type: ignore[attr-defined]
            # The pickler insists that __newobj__ makes the object's own class; this one makes any.
            made[:2] = [copyreg._reconstructor, (kind, object, None)]  # type: ignore[attr-defined]
        if len(made) > 2 and isinstance(made[2], dict):
            made[2] = {key: value for key, value in made[2].items() if key != _SITE}
        return tuple(made)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own = type(kind.__name__, (kind,), {**names, _PLAIN: kind, "__call__": call, "__reduce_ex__": reduce})
    return own


def _refusal(module: nn.Module) -> str | None:
    if isinstance(module, torch.fx.GraphModule):
        return "a GraphModule makes its class anew when it is recompiled"
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted module runs without Python hooks"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "a lazy module changes its class when it materialises; run it once first"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "a parametrized module edits its own class; attach to a module around it"
    return None


def _refuse(name: str, module: nn.Module) -> None:
    if why := _refusal(module):
        raise AttachError(
            f"{name or 'the model'!r} ({type(module).__name__}): {why}; wrap it instead: SaveWith(module, ...)"
        )
    if _SITE in module.__dict__:
        raise AttachError(f"{name or 'the model'!r} has saved-tensor hooks already: remove() that attachment first")


def _detach(attached: list[nn.Module], alike: list[nn.Module]) -> None:
    for module in attached:
        module.__dict__.pop(_SITE, None)
    for module in alike:
        in_use = any(_SITE in other.__dict__ for other in alike if type(other) is type(module))
        if not in_use and _PLAIN in type(module).__dict__:
            module.__class__ = _plain(type(module))
