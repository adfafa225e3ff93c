"""Attach to modules where they stand: no name, class or ``state_dict`` key changes."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable

from torch import nn

from disthooks._handles import Attachment, shown
from disthooks._locks import Order, shared
from disthooks._match import Pattern, inside, listed, match_modules
from disthooks.errors import AttachError
from disthooks.saved.classes import attach, detach, refusal, site_of
from disthooks.saved.entry import never_runs
from disthooks.saved.ledger import Ledger
from disthooks.saved.pipeline import Pipeline, Stage, pipeline
from disthooks.saved.recompute.places import proofs_of
from disthooks.saved.report import SavedReport
from disthooks.saved.site import Site
from disthooks.saved.stores.base import Store

_attaching = shared(Order.ATTACH)


_UNUSED = (
    "it is never called, because MultiheadAttention uses the weights of its out_proj itself; attach to the "
    "MultiheadAttention"
)


class Saving(Attachment):
    """What :func:`save_activations` attached."""

    def __init__(self, ledger: Ledger, store: Store, names: tuple[str, ...]) -> None:
        super().__init__()
        self._ledger, self._store = ledger, store
        self.on_remove(store.rest)
        self.names = names

    def __repr__(self) -> str:
        return f"<Saving of {len(self.names)} modules ({shown(self.names)}) to {self._store}>"

    def report(self) -> SavedReport:
        """Bytes stored, shared, kept and held under this attachment, on this rank."""
        return self._ledger.report(self._store, self.names)


def save_activations(model: nn.Module, patterns: Pattern | Iterable[Pattern], to: Stage | Pipeline) -> Saving:
    """Have what autograd saves in the forward of the matching modules go through ``to``.

    Attach before or after DDP, ``fully_shard`` or another engine takes the model. Names, classes (``type(m)``) and
    ``state_dict`` keys stay; ``copy.deepcopy`` and pickles of the model are those of the plain one. A matching
    module inside another one that matches is covered by the outer one. A call under ``no_grad``, in a
    ``torch.func`` transform, while exporting, or inside a checkpointed region goes through without hooks and
    is counted in ``report().passed``.

    Args:
        model: the model, or a part of it.
        patterns: one or several of: a glob over the module's name (``*`` crosses dots), a module class, a
            predicate of name and module.
        to: a store, or a :func:`~disthooks.pipeline`.

    Returns:
        A handle with ``remove()`` and ``report()``; also a context manager.

    Raises:
        UsageError: when ``model`` is no module, or ``patterns`` are none.
        MatchError: when a pattern matches no module; the message lists near names.
        AttachError: when a module cannot take hooks in place (a ``GraphModule``, a scripted module, one that is
            attached already); the message names the remedy. Nothing is attached then.

    >>> import torch
    >>> from disthooks import OnDisk
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> with save_activations(model, nn.Linear, OnDisk("/tmp")) as saving:
    ...     model(torch.ones(512, 64)).sum().backward()
    >>> saving.names, saving.report().moved > 0, type(model[0]) is nn.Linear
    (('0', '2'), True, True)
    """
    line, ledger = pipeline(to), Ledger()
    found = chosen(model, patterns)
    if line.recompute is not None:
        ledger.proofs = proofs_of(inside(model))
    with _attaching:
        return _attach(model, found, line, ledger)


def chosen(model: nn.Module, patterns: Pattern | Iterable[Pattern]) -> list[tuple[str, nn.Module]]:
    """The modules that :func:`save_activations` would attach to.

    >>> [name for name, _ in chosen(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "*")]
    ['']
    """
    return _outermost(_running(model, match_modules(model, listed(patterns))))


def _attach(model: nn.Module, chosen: list[tuple[str, nn.Module]], line: Pipeline, ledger: Ledger) -> Saving:
    for name, module in chosen:
        _refuse(name, module)
    saving = Saving(ledger, line.store, tuple(name for name, _ in chosen))
    attach((module, Site(line, ledger, name or type(module).__name__)) for name, module in chosen)
    # Weakly: a handle that outlives its model does not keep it.
    saving.on_remove(functools.partial(detach, weakref.WeakSet(module for _, module in chosen)))
    return saving


def _running(model: nn.Module, matched: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Without containers, which are never called themselves, and would stand for what is inside, and without others
    that are never called, which is said."""
    unused = {id(part.out_proj) for part in model.modules() if isinstance(part, nn.MultiheadAttention)}
    reasons = {name: _UNUSED if id(module) in unused else never_runs(module) for name, module in matched}
    if all(reasons.values()):
        name, why = next(iter(reasons.items()))
        inside = f": {f'{name}.*'.lstrip('.')!r}" if why != _UNUSED else ""
        raise AttachError(f"{name or 'the model'!r}: {why}{inside}")
    found = [(name, module) for name, module in matched if not reasons[name]]
    inner = {id(part) for _, module in found for part in module.modules()}
    if lost := [name for name, module in matched if reasons[name] == _UNUSED and id(module) not in inner]:
        warnings.warn(f"no hooks on {', '.join(map(repr, lost))}: {_UNUSED}", stacklevel=4)
    return found


def _outermost(matched: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    inner = {part for _, module in matched for part in module.modules() if part is not module}
    return [(name, module) for name, module in matched if module not in inner]


def _refuse(name: str, module: nn.Module) -> None:
    if why := refusal(module):
        raise AttachError(
            f"{name or 'the model'!r} ({type(module).__name__}): {why}; wrap it instead: SaveWith(module, ...)"
        )
    if site_of(module) is not None:
        raise AttachError(f"{name or 'the model'!r} has saved-tensor hooks already: remove() that attachment first")
