"""Saved-tensor hooks around any code of this thread."""

from __future__ import annotations

import threading
from types import TracebackType

from disthooks.saved.frame import Frame, why_not
from disthooks.saved.ledger import Ledger, SavedReport
from disthooks.saved.pipeline import Pipeline, Stage, pipeline


class saving:
    """Have what autograd saves inside the ``with`` block, in this thread, go through ``to``.

    Like ``torch.autograd.graph.save_on_cpu``, and so with no effect in the threads that ``nn.DataParallel``
    starts: use a wrapper or :func:`~disthooks.save_activations` there. The block can be entered again, also
    while it is open.

    Args:
        to: a store, or a :func:`~disthooks.pipeline`.

    Raises:
        UsageError: when ``to`` is not a store or pipeline.

    >>> import torch
    >>> from disthooks import OnDisk
    >>> x = torch.ones(64, 64, requires_grad=True)
    >>> with saving(OnDisk("/tmp")) as saved:
    ...     y = x.exp().sum()
    >>> y.backward()
    >>> saved.report().moved, saved.report().held
    (16384, 0)
    """

    def __init__(self, to: Stage | Pipeline) -> None:
        self._pipeline = pipeline(to)
        self._ledger = Ledger()
        self._open = threading.local()  # frames entered and not left, this thread's own

    def report(self) -> SavedReport:
        """Bytes stored, shared, kept and held, on this rank."""
        return self._ledger.report()

    def __enter__(self) -> saving:
        reason = why_not()
        if reason is not None:
            self._ledger.count_pass(reason)
        frame = None if reason is not None else Frame(self._pipeline, self._ledger)
        self._open.__dict__.setdefault("frames", []).append(frame and frame.__enter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        frame: Frame | None = self._open.frames.pop()
        if frame is not None:
            frame.__exit__(kind, error, trace)
