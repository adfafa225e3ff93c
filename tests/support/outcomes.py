"""A pytest plugin for ``tests/gpu/run.py``: what came of each test, as a line of JSON written when the test ends."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

FILE = os.environ.get("DISTHOOKS_OUTCOMES")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if FILE and not hasattr(config, "workerinput"):  # one process writes: a worker's reports come to it
        config.pluginmanager.register(_Writer(pathlib.Path(FILE)))


class _Writer:
    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(report.nodeid, report.outcome, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":  # a file that needs a package is skipped as a whole
            self._write(report.nodeid, report.outcome, report)

    def _write(self, test: str, outcome: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        row = {"test": test, "outcome": outcome, "seconds": round(getattr(report, "duration", 0.0), 2)}
        with self._path.open("a") as file:
            file.write(json.dumps(row | {"why": _why(report)}) + "\n")


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return (report.longreprtext.strip().splitlines() or [""])[-1][:300]
