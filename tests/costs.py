"""What tests cost: `--costs` lists the dearest, and fails those over LIMIT_S without the mark `costly`.

A machine on which much else runs says little about a test, and fails none.

Counted is the processor time of the test's process and of those that ended during it. Fixtures of a wider scope than
one test, which the first of their tests happens to pay, are listed by themselves.
"""

import heapq
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 3.0
"""Seconds of a processor that runs START in START_S. A slower one, or one that others keep busy, may take longer in
proportion."""
START, START_S = "import asyncio, email.message, http.client, json, unittest", 0.12
CROWDED = 3.0
"""More processes than this per core, on average, are much else."""
SHOWN = 10
COST = "processor seconds of "
BEGAN = pytest.StashKey[float]()
_costs: dict[str, float] = {}
_shared: dict[str, float] = {}
"""The cost of fixtures of a wider scope since the test began."""
_inner = [0.0]
"""The cost of all these fixtures, of the test and of each of them that is being set up."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--costs`."""
    parser.addoption("--costs", action="store_true", help=f"fail tests of over {LIMIT_S:g} s of processor time")


def spent() -> float:
    """Return the processor seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


def slowness() -> float:
    """Return how many times START_S this processor takes for START now, at least 1."""
    begun = [spent()]
    for _ in range(3):
        subprocess.run([sys.executable, "-I", "-c", START], check=True)
        begun.append(spent())
    return max(1.0, (begun[-1] - begun[0]) / 3 / START_S)


def crowded() -> bool:
    """Return whether much else than the tests runs on this machine. `os.getloadavg` is that of the tests' machine."""
    return float(Path("/proc/loadavg").read_text("ascii").split()[0]) > CROWDED * (os.cpu_count() or 1)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> Generator[None, Any, Any]:
    """Count fixtures of a wider scope by themselves."""
    if fixturedef.scope == "function":
        return (yield)
    _inner.append(0.0)
    began = spent()
    try:
        return (yield)
    finally:
        cost = spent() - began
        _shared[f"fixture {fixturedef.argname}, first of {request.node.nodeid or 'all'}"] = cost - _inner.pop()
        _inner[-1] += cost


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Begin to count."""
    _inner[:], item.stash[BEGAN] = [0.0], spent()
    _shared.clear()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the cost into the report of a test, and fail it if it is too high."""
    report = yield
    if report.when == "call" and item.config.option.costs:
        cost = spent() - item.stash[BEGAN] - _inner[0]
        report.user_properties += [(COST + name, each) for name, each in {**_shared, item.nodeid: cost}.items()]
        dear = cost > LIMIT_S and not item.get_closest_marker("costly")
        if dear and report.passed and not crowded() and cost > LIMIT_S * slowness():
            report.outcome = "failed"
            report.longrepr = (
                f"{cost:.1f} s of processor time, more than {LIMIT_S:g}: make it cheaper, or mark it costly"
            )
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the costs of a report."""
    for name, cost in report.user_properties:
        if name.startswith(COST) and isinstance(cost, float):
            _costs[name[len(COST) :]] = cost


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the dearest tests and fixtures."""
    if config.option.costs:
        terminalreporter.section(f"{spent():.0f} processor seconds, of them")
        for name, cost in heapq.nlargest(SHOWN, _costs.items(), key=lambda each: each[1]):
            terminalreporter.line(f"{cost:6.1f} {name}")
