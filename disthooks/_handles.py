"""The one handle that everything attached gives back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

A = TypeVar("A", bound="Attachment")


class Attachment:
    """What was attached, and how to take it off again: ``remove()``, or the end of a ``with`` block.

    Removing twice is allowed and does nothing the second time. Subclasses add ``report()``.

    >>> log = []
    >>> with Attachment() as attached:
    ...     attached.on_remove(lambda: log.append("off"))
    >>> attached.remove()
    >>> log
    ['off']
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def on_remove(self, undo: Callable[[], object]) -> None:
        """Have ``undo`` called on removal, the last one given first."""
        self._undo.callback(undo)

    def remove(self) -> None:
        """Take off everything that was attached."""
        self._undo.close()

    def __enter__(self: A) -> A:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
