"""TensorBoard, by torch's own writer."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

from disthooks.errors import UsageError
from disthooks.grads.sinks.base import Opened, Unopened, check_prefix, needed
from disthooks.grads.sinks.records import Histogram, histograms, scalars, texts


@dataclass(frozen=True)
class TensorBoard(Unopened):
    """Numbers as scalars, histograms as histograms, lists and words as text; there as soon as they are written.

    Scalars are float32 there, as always in TensorBoard. Text is logged only when there is some: ``nonfinite_at`` in
    the steps that have non-finite gradients.

    Args:
        log_dir: the directory of the run; it is made. ``torch.utils.tensorboard.SummaryWriter`` writes in it.
        prefix: put in front of every name; up to the first ``/`` it is the section in which TensorBoard shows it.

    Raises:
        UsageError: when attached, if tensorboard is not installed or the directory cannot be written.

    >>> TensorBoard("runs/7", prefix="train/")
    TensorBoard(log_dir='runs/7', prefix='train/')
    """

    log_dir: str | os.PathLike[str]
    prefix: str = "gradients/"

    def __post_init__(self) -> None:
        check_prefix(self, self.prefix)
        if not isinstance(self.log_dir, (str, os.PathLike)):
            raise UsageError(f"TensorBoard: log_dir is the directory of the run, got {self.log_dir!r}")

    def open(self) -> Opened:
        """Start a file of events."""
        writer = needed("torch.utils.tensorboard", "tensorboard", self).SummaryWriter
        try:
            return _Events(self, writer(os.fspath(self.log_dir)))
        except OSError as error:
            raise UsageError(f"TensorBoard: {os.fspath(self.log_dir)!r} cannot be written: {error.strerror}") from error


class _Events(Opened):
    """One file of events."""

    def __init__(self, sink: TensorBoard, writer: Any) -> None:
        super().__init__(sink)
        self._prefix, self._writer = sink.prefix, writer

    def __call__(self, record: dict[str, Any]) -> None:
        step = record["step"]
        for name, number in scalars(record).items():
            self._writer.add_scalar(self._prefix + name, number, step)
        for name, histogram in histograms(record).items():
            self._writer.add_histogram_raw(self._prefix + name, **_raw(histogram), global_step=step)
        for name, text in texts(record, most=None).items():
            self._writer.add_text(self._prefix + name, text, step)
        self._writer.flush()  # its thread may lag behind; less than a millisecond, and a killed process loses nothing

    def close(self) -> None:
        self._writer.close()


def _raw(histogram: Histogram) -> dict[str, Any]:
    """The arguments of ``add_histogram_raw``; sums are those of the middles of the buckets.

    TensorBoard draws the outermost bucket that is not empty as far as ``min`` and ``max``.
    """
    edges, counts = histogram
    filled = [i for i, count in enumerate(counts) if count] or [0, len(counts) - 1]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    return {
        "min": edges[filled[0]],
        "max": edges[filled[-1] + 1],
        "num": sum(counts),
        "sum": sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        "sum_squares": sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
        "bucket_limits": edges[1:],
        "bucket_counts": counts,
    }
