"""Saved-tensor hooks around any code of this thread: a block, or every call of a function."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from disthooks._torch import uncompiled
from disthooks.errors import UsageError
from disthooks.saved.entry import BREAK, nothing_to_hook, why_not
from disthooks.saved.frame import Frame
from disthooks.saved.ledger import Ledger
from disthooks.saved.pipeline import Pipeline, Stage, pipeline
from disthooks.saved.recompute.places import proofs_here
from disthooks.saved.report import SavedReport
from disthooks.saved.site import Site

F = TypeVar("F", bound=Callable[..., Any])


class saving:
    """Have what autograd saves inside a ``with`` block, or in the calls of a function, go through ``stages``.

    As a block it is like ``torch.autograd.graph.save_on_cpu``, and so has no effect in the threads that
    ``nn.DataParallel`` starts: use a wrapper or :func:`~disthooks.save_activations` there. The block can be entered
    again, also while it is open.

    As a decorator it takes a function, a method (static and class methods too), a generator function, or a class
    derived from ``torch.autograd.Function``: what ``ctx.save_for_backward`` gets in its calls goes through the
    stages, and what is saved beside them stays. A decorated Function is a subclass of the same name; the one that was
    given is as it was.

    Args:
        stages: a store, or what :func:`~disthooks.pipeline` takes or gives.

    Raises:
        UsageError: when ``stages`` make no pipeline, or what is decorated is none of these.

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
    def __init__(self, *stages: Stage | Pipeline) -> None:
        self._site = Site(pipeline(*stages), Ledger())
        if self._site.pipeline.recompute is not None:
            self._site.ledger.proofs = proofs_here()
        self._open = threading.local()  # frames entered and not left, this thread's own

    def __reduce__(self) -> tuple[type[saving], tuple[Pipeline]]:
        return saving, (self._site.pipeline,)  # a copy has saved nothing yet and is not open

    def report(self) -> SavedReport:
        """Bytes stored, shared, kept and held, on this rank."""
        return self._site.ledger.report(self._site.pipeline.store)

    @uncompiled(BREAK)
    def __enter__(self) -> saving:
        line, ledger, where, _ = self._site
        reason = why_not()
        if reason is not None:
            ledger.count_pass(reason, where)
        frame = None if reason is not None else Frame(line, ledger)
        self._open.__dict__.setdefault("frames", []).append(frame and frame.__enter__())
        return self

    @uncompiled(BREAK)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        frame: Frame | None = self._open.frames.pop()
        if frame is not None:
            frame.__exit__(kind, error, trace)

    def __call__(self, target: F) -> F:
        """``target`` with the hooks on in each of its calls."""
        if isinstance(target, (staticmethod, classmethod)):
            return cast(F, type(target)(self(target.__func__)))
        site = self._site._replace(name=getattr(target, "__qualname__", repr(target)))
        if isinstance(target, type) and issubclass(target, torch.autograd.Function):
            return cast(F, _function(site, target))
        if isinstance(target, (nn.Module, type)) or not callable(target):
            raise UsageError(
                f"saving(...) decorates a function, a method or a subclass of torch.autograd.Function, not {target!r}; "
                "for a module there are SaveWith(module, to) and save_activations(model, patterns, to)"
            )
        if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
            raise UsageError(
                f"{site.name} is asynchronous: other code could run while its hooks are on; decorate what it calls"
            )

        @functools.wraps(target)
        @uncompiled(callees=False)
        def decorated(*args: Any, **kwargs: Any) -> Any:  # a function, so that it becomes a method in a class
            if nothing_to_hook():
                return target(*args, **kwargs)
            return site.call(None, target, *args, **kwargs)

        return cast(F, decorated)


def _function(site: Site, target: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A subclass of ``target`` whose ``apply`` runs with the hooks on."""

    @uncompiled(callees=False)
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if nothing_to_hook():
            return super(own, cls).apply(*args, **kwargs)
        return site.call(None, super(own, cls).apply, *args, **kwargs)

    names = {"__module__": target.__module__, "__qualname__": target.__qualname__, "__doc__": target.__doc__}
    own: Any = type(target)
    own = own(target.__name__, (target,), {**names, "apply": classmethod(apply)})
    return cast("type[torch.autograd.Function]", own)
