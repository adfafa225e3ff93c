"""``BatchNotes``: what the loop says of its batches, kept for the last steps, and written for those that stand out."""

# [Note: who writes what a batch was]
# Each rank has batches of its own, and a sink is on the first rank. That a step stands out is known on every rank some
# steps later, from numbers that all ranks have alike. So each rank keeps what was noted of its last steps, and appends
# that of a step that stands out to a file of its own beside the log, without a collective. A reader finds the files by
# the name of the log.

from __future__ import annotations

import json
import math
import pathlib
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from disthooks.errors import UsageError
from disthooks.grads.sinks.local import Jsonl

_KEPT = 256  # steps
_MOST = 4096  # bytes of JSON of one call


def notes_file(log: pathlib.Path, rank: int | str) -> pathlib.Path:
    """The file beside ``log`` with what ``rank`` noted.

    >>> notes_file(pathlib.Path("runs/gradients.jsonl"), 1).name
    'gradients.jsonl.rank-1.data'
    """
    return log.with_name(f"{log.name.removesuffix('.gz')}.rank-{rank}.data")


def stands_out(record: Mapping[str, Any]) -> bool:
    """Whether a record says that its step was left out, run again, or had gradients that were not finite.

    >>> stands_out({"step": 3, "grad_norm": 1.0, "skipped": 0.0}), stands_out({"step": 4, "skipped": 1.0})
    (False, True)
    """
    is_finite = not record.get("nonfinite_params") and math.isfinite(record.get("grad_norm") or 0.0)
    return bool(not is_finite or record.get("skipped") or record.get("spike") or "rerun" in record)


class BatchNotes:
    """See [Note: who writes what a batch was].

    Args:
        sinks: the sinks of the attachment; the files are beside the first :class:`~disthooks.sinks.Jsonl`.
        rank: this rank.
    """

    def __init__(self, sinks: Iterable[Any], rank: int) -> None:
        log = next((pathlib.Path(sink.path) for sink in sinks if isinstance(sink, Jsonl)), None)
        self._file = None if log is None else notes_file(log, rank)
        self._now: deque[str] = deque(maxlen=16 * _KEPT)  # a loop that makes no step must not fill the memory
        self._kept: deque[tuple[int, list[str]]] = deque(maxlen=_KEPT)

    def note(self, value: Any) -> None:
        if self._file is None:
            raise UsageError("note_data(): it is written beside a log, so give the sink dh.sinks.Jsonl(path)")
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise UsageError(f"note_data(): JSON cannot hold {kind}: give numbers, texts, lists or dicts") from error
        if len(text) > _MOST:
            raise UsageError(f"note_data(): {len(text)} bytes of JSON, and {_MOST} is the most: give ids, not the data")
        self._now.append(text)

    def take(self, step: int) -> None:
        """Keep what was noted since the last step, as notes of ``step``."""
        if self._now:
            self._kept.append((step, list(self._now)))
            self._now.clear()

    def forget(self) -> None:
        """Drop what was noted since the last step: the loop makes no step of it."""
        self._now.clear()

    def write(self, record: Mapping[str, Any]) -> None:
        """Write what was noted of the record's step, if it stands out."""
        if self._file is None or not self._kept or not stands_out(record):
            return
        for step, notes in self._kept:
            if step == record["step"]:
                self._append(f'{{"step": {step}, "time": {time.time():.3f}, "data": [{", ".join(notes)}]}}\n')

    def _append(self, line: str) -> None:
        assert self._file is not None
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            warnings.warn(f"{self._file} cannot be written: {error.strerror}; training goes on", stacklevel=2)
