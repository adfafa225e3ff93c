"""Each failure is printed when it happens: a run that is stopped before its end has said what failed."""

from __future__ import annotations

import pytest

#: Of a message, in characters: its end, where an exception stands.
MOST = 2000


class _AtOnce:
    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        message = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else report.longreprtext
        self._terminal.write_line(f"\n{report.nodeid}: {report.when}: {report.outcome}\n{message[-MOST:]}", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist prints nothing: it sends its reports to the process that started it."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_AtOnce(terminal))
