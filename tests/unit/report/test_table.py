"""The table of a log has every number that the log has."""

from __future__ import annotations

import math
import pathlib

import pytest
from typer.testing import CliRunner

from disthooks.report.log import number, read
from disthooks.run.cli.app import app
from tests.support.logs import log

parquet = pytest.importorskip("pyarrow.parquet")


def test_every_number_is_a_row(tmp_path: pathlib.Path) -> None:
    file, table = log(tmp_path / "run.jsonl", steps=300, layers=5), tmp_path / "run.parquet"
    assert CliRunner().invoke(app, ["report", str(file), "-o", str(table)]).exit_code == 0
    (run,) = read(file).runs
    rows = parquet.read_table(table).to_pylist()
    found = {(row["step"], row["statistic"], row["of"], row["name"]): row["value"] for row in rows}
    assert len(found) == len(rows)
    many = 0
    for at, record in enumerate(run.records):
        for name, value in record.items():
            if name not in ("step", "run") and (truth := number(value)) is not None:
                many += 1
                assert found[record["step"], name, "", ""] == pytest.approx(truth, nan_ok=True)
        for (of, statistic), columns in run.columns.items():
            for name, truth in zip(run.names[of], columns.row(at), strict=True):
                many += not math.isnan(truth)
                assert found[record["step"], statistic, of, name] == truth
    assert many == len(rows) > 300 * 8 * 5
    assert {row["run"] for row in rows} == {"r"}


def test_what_cannot_be_written(tmp_path: pathlib.Path) -> None:
    file = log(tmp_path / "run.jsonl", steps=2, layers=1)
    result = CliRunner().invoke(app, ["report", str(file), "-o", str(tmp_path / "none" / "run.parquet")])
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
    (tmp_path / "empty.jsonl").write_text("")
    table = tmp_path / "empty.parquet"
    assert CliRunner().invoke(app, ["report", str(tmp_path / "empty.jsonl"), "-o", str(table)]).exit_code == 0
    assert parquet.read_table(table).num_rows == 0
