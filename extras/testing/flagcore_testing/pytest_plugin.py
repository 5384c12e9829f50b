"""Registers the kit in pytest: the mark `device`, and the options and the report of `flag plugins check`.

An entry point loads this module in every pytest, so plugins need no settings, and it imports nothing else of flagcore.
The report has a line of JSON for each step: `{"begins": CHECK}`, then the result of the check, `{"ends": true}` last.
So if the plugin ends the process, the check that began last failed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

RESULT = "flagcore_result"
"""The property of a test that has the result of its check."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `flag plugins check`."""
    group = parser.getgroup("flagcore", "conformance of a flagcore plugin")
    group.addoption("--flagcore-plugin", metavar="NAME", help="name of the plugin to check")
    group.addoption("--flagcore-folder", metavar="DIR", help="folder of its pyproject.toml; without, it is installed")
    group.addoption("--flagcore-seconds", metavar="S", type=float, default=90.0, help="time limit of a check")
    group.addoption("--flagcore-report", metavar="FILE", help="file for the results as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark `device`, and start the report."""
    config.addinivalue_line("markers", "device: needs a real accelerator")
    if file := config.getoption("--flagcore-report"):
        logging.lastResort, logging.root.manager.emittedNoHandlerWarning = None, True  # checks cause errors on purpose
        config.pluginmanager.register(Report(Path(file), config.getoption("--flagcore-seconds")))


class Report:
    """Writes the report. A check that exceeds the time limit ends the process by SIGALRM, also in native code."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds

    def _write(self, record: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def pytest_runtest_setup(self, item: Any) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        self._write({"begins": item.callspec.params["check"].__name__})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._write(dict(report.user_properties)[RESULT])

    def pytest_sessionfinish(self) -> None:
        self._write({"ends": True})
        os._exit(0)  # threads that the plugin started may keep the process alive
