"""``write_parquet``: all numbers of a run as one table, for DuckDB, pandas, polars."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from disthooks.errors import UsageError
from disthooks.report.log import Run, number

_STEPS = 256  # records that are in memory as a table at a time


def write_parquet(runs: Sequence[Run], file: pathlib.Path) -> int:
    """Write the numbers of ``runs`` to a Parquet file; return how many there are.

    A row is one number, with the columns ``run`` (text), ``step`` (int64), ``statistic`` (text), ``of`` ("", "param" or
    "module"), ``name`` (of the parameter or module) and ``value`` (float64; NaN and infinities as they are in the log,
    but of single parameters and modules infinity stands for both).

    Raises:
        UsageError: when pyarrow is not installed, or the file cannot be written.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(f"-o {file}: a Parquet file needs pyarrow: pip install 'disthooks[parquet]'") from error
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    names = ("run", "step", "statistic", "of", "name", "value")
    kinds = (text, pyarrow.int64(), text, text, text, pyarrow.float64())
    schema = pyarrow.schema(list(zip(names, kinds, strict=True)))
    many = 0
    try:
        with parquet.ParquetWriter(file, schema) as writer:
            for columns in _columns(runs):
                arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
                writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
                many += len(columns[0])
    except OSError as error:
        raise UsageError(f"-o {file}: cannot be written: {error.strerror or error}") from error
    return many


def _columns(runs: Sequence[Run]) -> Iterator[list[list[Any]]]:
    for run in runs:
        for begin in range(0, len(run.records), _STEPS):
            rows = list(_rows(run, range(begin, min(begin + _STEPS, len(run.records)))))
            yield [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(6)]


def _rows(run: Run, places: Sequence[int]) -> Iterator[tuple[str, int, str, str, str, float]]:
    who = str(run.name)
    for at in places:
        record = run.records[at]
        step = record.step
        for name, value in record.items():
            found = None if name in ("step", "run") else number(value)
            if found is not None:
                yield who, step, name, "", "", found
        for (of, statistic), table in run.columns.items():
            for name, value in zip(run.names[of], table.row(at), strict=True):
                if not math.isnan(value):
                    yield who, step, statistic, of, name, value
