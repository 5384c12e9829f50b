"""Runs the tests in forks of the process that has collected them: `--forks N`.

A fork starts with all modules of tests imported. It takes the tests of one file after the other, or as the marks
`together` and `spread` say, and sends its reports to the first process.

A test of REPEATED that fails runs once more at the end, with fixtures of its own while no other test runs: it has real
processes and clocks, which a busy machine delays. The summary lists it as `RERUN`.
"""

import gc
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

REPEATED = ("slow", "long")
"""Marks of tests that may fail once."""
RERUN = "rerun"
"""The outcome of a report that failed and is repeated."""
Scope = list[int]
"""Places in the list of all tests that one fork runs one after the other."""


@dataclass(slots=True, eq=False)
class Fork:
    """A process, what it runs, and what it was given to run after that."""

    pid: int
    channel: "Connection[Any, Any]"
    running: int | None = None
    left: deque[int] = field(default_factory=deque)
    reports: list[pytest.TestReport] = field(default_factory=list)
    """Of the test that is running."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--forks`."""
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run the tests in so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks, unless pytest is to run them here."""
    option = session.config.option
    if not option.forks or option.collectonly or option.usepdb or session.testsfailed:
        return None
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        reporter.showfspath = False  # tests of several files report in turns
    gc.collect()
    gc.freeze()
    failed: Scope = []
    _run(session, deque(_scopes(session.items)), option.forks, failed)
    repeated = [session.items[place] for place in failed]
    _run(session, deque([failed[place] for place in scope] for scope in _scopes(repeated)), 1, None)
    return True


def _run(session: pytest.Session, scopes: "deque[Scope]", count: int, failed: Scope | None) -> None:
    """Run scopes in `count` forks at a time. `failed` takes the tests that are to be repeated, if any are."""
    forks = set[Fork]()
    try:
        while forks or scopes:
            while scopes and len(forks) < count:
                forks.add(_fork(session, forks, scopes.popleft()))
            ready = wait([each.channel for each in forks])
            for fork in [each for each in forks if each.channel in ready]:
                try:
                    _receive(session, fork, scopes, failed)
                except (EOFError, ConnectionError):
                    forks.remove(fork)
                    _ended(session, fork, scopes, failed)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
    finally:
        for fork in forks:
            with suppress(ProcessLookupError):
                os.kill(fork.pid, signal.SIGKILL)
            os.waitpid(fork.pid, 0)


def _scopes(items: list[pytest.Item]) -> list[Scope]:
    """Return the tests that stay in one process, in the order of the first of each."""
    scopes: dict[str, Scope] = {}
    for place, item in enumerate(items):
        together = item.get_closest_marker("together")
        alone = item.get_closest_marker("spread")
        name = together.args[0] if together else item.nodeid if alone else str(item.path)
        scopes.setdefault(name, []).append(place)
    return list(scopes.values())


def _fork(session: pytest.Session, others: set[Fork], scope: Scope) -> Fork:
    """Return a fork that begins with a scope."""
    here, there = Pipe()
    base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    if not (pid := os.fork()):
        for channel in (here, *(each.channel for each in others)):
            channel.close()
        _work(session, there, scope, base / f"fork-{os.getpid()}")
    there.close()
    return Fork(pid, here, left=deque(scope))


def _work(session: pytest.Session, channel: "Connection[Any, Any]", scope: Scope, base: Any) -> NoReturn:
    """Run the tests in a fork and end it. The status is 0 if all that it was given ran."""
    status, config = 1, session.config
    try:
        base.mkdir(mode=0o700)
        config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
        manager = config.pluginmanager
        manager.unregister(name="terminalreporter")
        if capture := manager.get_plugin("capturemanager"):  # files of its own
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        manager.register(_Sender(config, channel))
        for place, following in pairwise(chain(_given(channel, scope), [None])):
            assert place is not None
            channel.send(place)
            nextitem = None if following is None else session.items[following]
            config.hook.pytest_runtest_protocol(item=session.items[place], nextitem=nextitem)
        status = 0
    except BaseException:
        if capture := config.pluginmanager.get_plugin("capturemanager"):
            capture.stop_global_capturing()
        traceback.print_exc()
    finally:
        os._exit(status)


def _given(channel: "Connection[Any, Any]", scope: Scope) -> Iterator[int]:
    """Yield the places of a scope, and of those that the first process then gives."""
    while scope:
        yield from scope
        channel.send(None)
        scope = channel.recv()


@dataclass(eq=False)
class _Sender:
    config: pytest.Config
    channel: "Connection[Any, Any]"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.channel.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def _receive(session: pytest.Session, fork: Fork, scopes: "deque[Scope]", failed: Scope | None) -> None:
    """Take a message of a fork: the test that begins, a report, or the wish for more."""
    message, config = fork.channel.recv(), session.config
    if message is None:
        scope = scopes.popleft() if scopes else []
        fork.left.extend(scope)
        fork.channel.send(scope)
    elif isinstance(message, int):
        fork.running = message
        fork.left.remove(message)
    else:
        fork.reports.append(config.hook.pytest_report_from_serializable(config=config, data=message))
        if fork.reports[-1].when == "teardown":
            _report(session, fork, failed)


def _report(session: pytest.Session, fork: Fork, failed: Scope | None) -> None:
    """Report the test of a fork, which is over."""
    assert fork.running is not None
    item, hook = session.items[fork.running], session.config.hook
    if failed is not None and any(map(item.get_closest_marker, REPEATED)) and any(each.failed for each in fork.reports):
        failed.append(fork.running)
        for report in fork.reports:
            report.outcome = RERUN if report.failed else report.outcome  # type: ignore[assignment]
    for report in fork.reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    fork.reports = []


def _ended(session: pytest.Session, fork: Fork, scopes: "deque[Scope]", failed: Scope | None) -> None:
    """Fail the test that ended its process, and give what was left to another one."""
    _, status = os.waitpid(fork.pid, 0)
    if status and fork.running is not None:
        item = session.items[fork.running]
        cause = f"the process of the test ended with status {os.waitstatus_to_exitcode(status)}"
        for when, outcome in (("call", "failed"), ("teardown", "passed")):
            fork.reports.append(pytest.TestReport(item.nodeid, item.location, {}, outcome, cause, when))  # type: ignore[arg-type]
        _report(session, fork, failed)
    if fork.left:
        scopes.appendleft([*fork.left])


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show what is repeated as `R`."""
    return (RERUN, "R", RERUN.upper()) if report.outcome == RERUN else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List what was repeated, and why."""
    if repeated := terminalreporter.getreports(RERUN):
        terminalreporter.section("repeated alone")
        for report in repeated:
            terminalreporter.line(f"RERUN {report.nodeid}\n{report.longrepr}")
