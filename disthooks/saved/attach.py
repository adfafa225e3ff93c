"""``saving`` puts hooks around a block of code or a function, ``save_activations`` around modules where they stand."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from disthooks._handles import Attachment, first_names
from disthooks._locks import new_lock
from disthooks._match import Pattern, as_patterns, match_modules, unwrap_engine
from disthooks._torch import uncompiled
from disthooks.errors import AttachError, UsageError
from disthooks.saved.hooks import HookSite, SavedTensorHooks
from disthooks.saved.module_class import attach, detach, refusal, site_of
from disthooks.saved.pipeline import Droppable, OpenPipeline, Pipeline, Stage, pipeline
from disthooks.saved.recompute.verify import proofs_here, proofs_of
from disthooks.saved.report import SavedReport
from disthooks.saved.when_to_hook import BREAK, nothing_to_hook, reason_never_called, reason_not_to_hook

F = TypeVar("F", bound=Callable[..., Any])


class saving:
    """Put the tensors that autograd saves in a ``with`` block, or in the calls of a function, through ``stages``.

    As a block it is like ``torch.autograd.graph.save_on_cpu``, and so has no effect in the threads that
    ``nn.DataParallel`` starts: use a wrapper or :func:`~disthooks.save_activations` there. The block can be entered
    again, also while it is open.

    As a decorator it takes a function, a method (static and class methods too), a generator function, or a class
    derived from ``torch.autograd.Function``: the tensors that ``ctx.save_for_backward`` gets in its calls go through
    the stages, and tensors that are saved in another way stay. A decorated Function is a subclass of the same name, and
    the original class is not changed.

    Args:
        stages: a store; before it :class:`~disthooks.Recompute` and codecs, in this order.
        at_least, selective_checkpoints: see :class:`~disthooks.SaveWith`.

    Raises:
        UsageError: when ``stages`` are none of these, or when it decorates something else.

    >>> import torch
    >>> from disthooks import OnDisk
    >>> x = torch.ones(256, 256, requires_grad=True)
    >>> with saving(OnDisk("/tmp")) as saved:
    ...     y = x.exp().sum()
    >>> y.backward()
    >>> saved.report().moved, saved.report().held
    (262144, 0)

    >>> to_disk = saving(OnDisk("/tmp"))
    >>> svd = to_disk(torch.linalg.svd)
    >>> svd(x, full_matrices=False).S.sum().backward()
    >>> to_disk.report().calls, to_disk.report().moved > 0
    (1, True)
    """

    @uncompiled(BREAK)
    def __init__(
        self, *stages: Stage | Pipeline, at_least: int | str | None = None, selective_checkpoints: bool = True
    ) -> None:
        checked = pipeline(*stages, at_least=at_least, selective_checkpoints=selective_checkpoints)
        self._site = HookSite(OpenPipeline(checked, None if checked.recompute is None else proofs_here()))
        # A stack, because the same block may be entered again while it is open; None where hooks could not open.
        self._entered = threading.local()  # the hooks that this thread entered and has not left

    def __reduce__(self) -> tuple[type[saving], tuple[Pipeline]]:
        return saving, (self._site.pipeline.stages,)  # a copy has saved nothing yet, and it is not open

    def report(self) -> SavedReport:
        """Bytes stored, shared, kept and held, on this rank."""
        return self._site.pipeline.report()

    @uncompiled(BREAK)
    def __enter__(self) -> saving:
        reason = reason_not_to_hook()
        if reason is not None:
            self._site.pipeline.counters.count_pass(reason, "")
        hooks = None if reason is not None else SavedTensorHooks(self._site.pipeline)
        self._entered.__dict__.setdefault("hooks", []).append(hooks and hooks.__enter__())
        return self

    @uncompiled(BREAK)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks: SavedTensorHooks | None = self._entered.hooks.pop()
        if hooks is not None:
            hooks.__exit__(kind, error, trace)
            if kind is None and hooks.saw_nothing:
                self._site.pipeline.counters.tell_of_nothing()

    def __call__(self, target: F) -> F:
        """``target`` with the hooks on in each of its calls."""
        if isinstance(target, (staticmethod, classmethod)):
            return cast(F, type(target)(self(target.__func__)))
        site = self._site._replace(name=getattr(target, "__qualname__", repr(target)))
        if isinstance(target, type) and issubclass(target, torch.autograd.Function):
            return cast(F, _autograd_function(site, target))
        if isinstance(target, (nn.Module, type)) or not callable(target):
            raise UsageError(
                f"saving(...) decorates a function, a method or a subclass of torch.autograd.Function, not {target!r}; "
                "for a module there are SaveWith(module, *stages) and save_activations(model, patterns, *stages)"
            )
        if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
            raise UsageError(
                f"{site.name} is asynchronous: other code could run while its hooks are on; decorate what it calls"
            )

        @functools.wraps(target)
        @uncompiled(callees=False)
        # It is a function and no callable object, so that it becomes a method when it stands in a class.
        def decorated(*args: Any, **kwargs: Any) -> Any:
            if nothing_to_hook():
                return target(*args, **kwargs)
            return site.call(None, target, *args, **kwargs)

        return cast(F, decorated)


def _autograd_function(site: HookSite, target: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A subclass of ``target`` whose ``apply`` runs with the hooks on."""

    @uncompiled(callees=False)
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if nothing_to_hook():
            return super(own, cls).apply(*args, **kwargs)
        return site.call(None, super(own, cls).apply, *args, **kwargs)

    # It is a subclass of the same name, so that `target` is not changed for code that uses it undecorated.
    names = {"__module__": target.__module__, "__qualname__": target.__qualname__, "__doc__": target.__doc__}
    own: Any = type(target)
    own = own(target.__name__, (target,), {**names, "apply": classmethod(apply)})
    return cast("type[torch.autograd.Function]", own)


_attaching = new_lock()  # one thread at a time, so that a module is not attached twice

_UNUSED = (
    "it is never called, because MultiheadAttention uses the weights of its out_proj itself; attach to the "
    "MultiheadAttention"
)
_NOT_CALLED = (
    "weights of {names} have gradients, but no call of these modules was seen, so nothing was stored. Hooks open in "
    "module(x), and not in module.forward(x), module._call_impl(x) or nn.Module.__call__(module, x): call the module, "
    "or wrap it, because the forward of SaveWith(module, ...) opens hooks, too"
)


def _have_gradients(modules: Iterable[nn.Module]) -> bool:
    return any(p.grad is not None for module in modules for p in module.parameters())


class SavingHandle(Attachment):
    """The handle of the hooks that :func:`save_activations` attached."""

    def __init__(self, pipeline: OpenPipeline, names: tuple[str, ...], modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._pipeline = pipeline
        # The set is weak, so that a handle that outlives its model does not keep it in memory. Gradients that were
        # there before tell nothing about calls.
        self._modules = weakref.WeakSet(() if _have_gradients(modules) else modules)
        self.on_remove(pipeline.store.release_idle)
        self.names = names

    def __repr__(self) -> str:
        return f"<SavingHandle of {len(self.names)} modules ({first_names(self.names)}) to {self._pipeline.store}>"

    def report(self) -> SavedReport:
        """Bytes stored, shared, kept and held under this attachment, on this rank."""
        self._warn_if_not_called()
        return self._pipeline.report(self.names)

    def _limit_drops(self, droppable: Droppable) -> None:
        """Let Recompute drop no more than ``droppable`` says, which others may share, and may change at any time."""
        self._pipeline.droppable = droppable

    def remove(self) -> None:
        """Take off all hooks. Tensors that are stored come back all the same."""
        self._warn_if_not_called()
        super().remove()

    def _warn_if_not_called(self) -> None:
        # A call that leaves out `__call__` runs no code of disthooks. Gradients tell of it, and no step takes longer.
        counters = self._pipeline.counters
        if not counters.has_calls and _have_gradients(self._modules):
            counters.warned.warn("not called", _NOT_CALLED.format(names=first_names(self.names)))


def save_activations(
    model: nn.Module,
    patterns: Pattern | Iterable[Pattern],
    *stages: Stage | Pipeline,
    at_least: int | str | None = None,
    selective_checkpoints: bool = True,
) -> SavingHandle:
    """Put the tensors that autograd saves in the forward of the matching modules through ``stages``.

    Attach before or after DDP, ``fully_shard`` or another engine takes the model. Names, classes (``type(m)``) and
    ``state_dict`` keys stay; ``copy.deepcopy`` and pickles of the model are those of the plain one. If a matching
    module is inside another matching module, the hooks of the outer one are enough. A call under ``no_grad``, in a
    ``torch.func`` transform, while exporting, or inside a checkpointed region runs without hooks and is counted in
    ``report().passed``. Hooks open in ``module(x)``, not in ``module.forward(x)``: if no module was called
    and there are gradients, ``report()`` and ``remove()`` warn.

    Args:
        model: the model, or a part of it.
        patterns: one or several patterns: a glob over the module's name (``*`` crosses dots), a module class, a
            predicate of name and module.
        stages: a store; before it :class:`~disthooks.Recompute` and codecs, in this order: ``Recompute(), OnCpu()``.
        at_least, selective_checkpoints: see :class:`~disthooks.SaveWith`.

    Returns:
        A handle with ``remove()`` and ``report()``; also a context manager.

    Raises:
        UsageError: when ``model`` is no module, or a pattern or stage is none of these.
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
    checked = pipeline(*stages, at_least=at_least, selective_checkpoints=selective_checkpoints)
    found = chosen(model, patterns)
    opened = OpenPipeline(checked, None if checked.recompute is None else proofs_of(unwrap_engine(model)))
    return attach_to(found, HookSite(opened))


def attach_to(found: Iterable[tuple[str, nn.Module]], site: HookSite) -> SavingHandle:
    """Attach to the modules that :func:`chosen` found; each has ``site`` with a name of its own.

    Raises:
        AttachError: see :func:`save_activations`.
    """
    found = list(found)
    with _attaching:
        # All modules are checked before hooks go on the first one, so that after an error nothing is attached.
        for name, module in found:
            where = repr(name or "the model")
            if why := refusal(module):
                raise AttachError(f"{where} ({type(module).__name__}): {why}; wrap it instead: SaveWith(module, ...)")
            if site_of(module) is not None:
                raise AttachError(f"{where} has saved-tensor hooks already: remove() that attachment first")
        saving = SavingHandle(site.pipeline, tuple(name for name, _ in found), [module for _, module in found])
        attach((module, site._replace(name=name or type(module).__name__)) for name, module in found)
        saving.on_remove(functools.partial(detach, weakref.WeakSet(module for _, module in found)))
        return saving


def chosen(model: nn.Module, patterns: Pattern | Iterable[Pattern]) -> list[tuple[str, nn.Module]]:
    """The modules that :func:`save_activations` would attach to.

    Raises:
        AttachError: when no matching module is ever called.

    >>> [name for name, _ in chosen(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "*")]
    ['']
    """
    matched = match_modules(model, as_patterns(patterns))
    # Hooks act when a module is called. Containers such as `ModuleList` are left out silently: their children are
    # called, not they. The user is warned of an `out_proj` of MultiheadAttention, which looks like a layer and is none.
    unused = {id(part.out_proj) for part in model.modules() if isinstance(part, nn.MultiheadAttention)}
    reasons = {name: _UNUSED if id(module) in unused else reason_never_called(module) for name, module in matched}
    if all(reasons.values()):
        name, why = next(iter(reasons.items()))
        hint = f": {f'{name}.*'.lstrip('.')!r}" if why != _UNUSED else ""
        raise AttachError(f"{name or 'the model'!r}: {why}{hint}")
    found = [(name, module) for name, module in matched if not reasons[name]]
    covered = {id(part) for _, module in found for part in module.modules()}
    if lost := [name for name, module in matched if reasons[name] == _UNUSED and id(module) not in covered]:
        warnings.warn(f"no hooks on {', '.join(map(repr, lost))}: {_UNUSED}", stacklevel=3)
    # The hooks of a module take the tensors that its parts save, too, so its parts need none.
    inner = {part for _, module in found for part in module.modules() if part is not module}
    return [(name, module) for name, module in found if module not in inner]
