"""Runs the conformance kit on plugins, each in a process of its own: a crash there is a failed check."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.plugins.installed import installed, origin
from flagcore.testing.package import read_source

SECONDS = 600.0
"""How long the checks of one plugin may take."""
ENTRY = "entry_point_names_the_plugin"
"""The check that fails where a folder's pyproject.toml cannot be read."""
CHECK_SECONDS = 90.0
"""How long one of them may: far more than any takes that waits for a tool."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A plugin with the result of each check: `check`, `state` (passed, failed, skipped), `message` and `fix`."""

    name: str
    version: str
    results: tuple[dict[str, str], ...]

    def of(self, state: str) -> list[dict[str, str]]:
        """Return the results of one state."""
        return [result for result in self.results if result["state"] == state]

    @property
    def record(self) -> dict[str, Any]:
        """The counts, and the failures with what to do."""
        failures = [{key: result[key] for key in ("check", "message", "fix")} for result in self.of("failed")]
        counts = {state: len(self.of(state)) for state in ("passed", "failed", "skipped")}
        return {"name": self.name, "version": self.version, **counts, "failures": failures}


@dataclass(frozen=True, slots=True)
class _Wanted:
    name: str
    version: str
    folder: Path | None = None
    unreadable: str = ""
    """What is wrong with its pyproject.toml, so that nothing else can be checked."""


def check_plugins(targets: Sequence[str] = ()) -> list[Checked]:
    """Check plugins by their name or by the folder of their pyproject.toml; without any, all that are installed.

    A pyproject.toml that names no plugin is a failed check. Raises UsageError for what is neither.
    """
    wanted = [found for target in targets for found in _wanted(target)] if targets else _all()
    at_once = max(1, min(4, os.cpu_count() or 1))
    checked: list[Checked] = []
    for start in range(0, len(wanted), at_once):
        checked += _run(wanted[start : start + at_once])
    return checked


def _all() -> list[_Wanted]:
    points = installed(plugins.GROUP).points
    return [_Wanted(name, origin(found[0]).version) for name, found in sorted(points.items())]


def _wanted(target: str) -> list[_Wanted]:
    points = installed(plugins.GROUP).points
    if target in points:
        return [_Wanted(target, origin(points[target][0]).version)]
    folder = Path(target)
    if folder.is_dir():
        try:
            package = read_source(folder.resolve())
        except UsageError as error:
            if not (folder / "pyproject.toml").is_file():
                raise
            return [_Wanted(folder.resolve().name, "", unreadable=str(error))]
        return [_Wanted(name, package.version, package.folder) for name in package.points]
    near = get_close_matches(target, points, n=1)
    hint = f"did you mean {near[0]}?" if near else f"installed: {', '.join(sorted(points)) or 'none'}"
    raise UsageError(f"{target} is neither an installed plugin nor the folder of one; {hint}")


def _run(wanted: Sequence[_Wanted]) -> list[Checked]:
    unreadable = [_unreadable(each) for each in wanted if each.unreadable]
    return [*unreadable, *_checked([each for each in wanted if not each.unreadable])]


def _unreadable(each: _Wanted) -> Checked:
    fix = "fix that line of pyproject.toml; see docs/write-a-plugin.md"
    return Checked(each.name, "", ({"check": ENTRY, "state": "failed", "message": each.unreadable, "fix": fix},))


def _checked(wanted: Sequence[_Wanted]) -> list[Checked]:
    with tempfile.TemporaryDirectory(prefix="flagcore-check-") as folder:
        started = [(each, Path(folder, f"{place}.jsonl")) for place, each in enumerate(wanted)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for each, report in started:
                running.append(_start(each, report))
            return [_ended(each, report, process) for (each, report), process in zip(started, running, strict=True)]
        finally:
            for process in running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(each: _Wanted, report: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "flagcore.testing.child", str(report), each.name]
    argv += [str(each.folder)] if each.folder else []
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def _ended(each: _Wanted, report: Path, process: subprocess.Popen[bytes]) -> Checked:
    code, how = _waited(report, process)
    records = _read(report)
    results = [record for record in records if "state" in record]
    if code != 0 or not any("ends" in record for record in records):
        begun = next((record["begins"] for record in reversed(records) if "begins" in record), "the start")
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        told = how or f"{ended} ended the process"
        process_fix = (
            "ask native libraries in a process of their own (flagcore.vendorkit.machine), with a limit of time"
        )
        fix = "let no hook wait without a limit of time, and no pattern repeat what repeats" if how else process_fix
        message = f"{each.name}: {told} during this check; the checks after it did not run"
        results.append({"check": begun, "state": "failed", "message": message, "fix": fix})
    return Checked(each.name, each.version, tuple(results))


def _waited(report: Path, process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Return the exit status and why the process was given up: it may not take long for all, nor for one check."""
    start = last = time.monotonic()
    size = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.2), ""
        now = time.monotonic()
        if report.exists() and report.stat().st_size != size:
            size, last = report.stat().st_size, now
        for since, most in ((last, CHECK_SECONDS), (start, SECONDS)):
            if now - since > most:
                return 1, f"it took more than {most:.0f} s"


def _read(report: Path) -> list[dict[str, str]]:
    records = []
    with suppress(OSError):
        for line in report.read_text("utf-8").splitlines():
            with suppress(ValueError):  # the last one may be cut
                records.append(json.loads(line))
    return records


def as_text(checked: Sequence[Checked]) -> str:
    """Return one paragraph per plugin: counts, failures with a fix, and reasons of skipped checks."""
    return "\n\n".join("\n".join(_summary_lines(plugin)) for plugin in checked)


def _summary_lines(plugin: Checked) -> Iterator[str]:
    passed, failed, skipped = (len(plugin.of(state)) for state in ("passed", "failed", "skipped"))
    counts = _("{passed} passed, {failed} failed, {skipped} skipped", passed=passed, failed=failed, skipped=skipped)
    yield f"{plugin.name} {plugin.version}: {counts}"
    for each in plugin.of("failed"):
        yield "  " + _("failed: {check}", check=each["check"])
        yield f"    {each['message']}"
        yield "    " + _("fix: {fix}", fix=each["fix"])
    reasons: dict[str, list[str]] = {}
    for each in plugin.of("skipped"):
        reasons.setdefault(each["message"], []).append(each["check"])
    for reason, checks in reasons.items():
        more = " " + _("and {count} more", count=len(checks) - 1) if len(checks) > 1 else ""
        yield "  " + _("skipped: {checks}: {reason}", checks=checks[0] + more, reason=reason)
