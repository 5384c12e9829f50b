"""Runs the conformance kit on plugins: pytest in a separate process each. A crash of the process is a failed check."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flagcore import plugins
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.plugins.loader import installed, origin
from flagcore_testing.package import read_source

SECONDS = 600.0
"""Time limit of all checks of one plugin."""
CHECK_SECONDS = 90.0
"""Time limit of one check, far above the time of checks that wait for a tool."""
PYTEST = (
    *(sys.executable, "-m", "pytest", "-p", "flagcore_testing.pytest_plugin", "-c", os.devnull, "--noconftest", "-s"),
    "--assert=plain",
    *(
        f"-pno:{name}"
        for name in ("cacheprovider", "doctest", "faulthandler", "junitxml", "logging", "terminal", "warnings")
    ),
    *("--pyargs", "flagcore_testing.conformance::TestPlugin::test_conformance"),
)
"""The command of one plugin's tests, without the settings and the plugins of the user's pytest."""
AT_ONCE = max(1, min(4, os.cpu_count() or 1))
"""Number of plugins that are checked at the same time."""


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
        """The counts, and the failures with their fixes."""
        keys = ("check", "message", "fix", "places")
        failures = [{key: result.get(key, "") for key in keys} for result in self.of("failed")]
        counts = {state: len(self.of(state)) for state in ("passed", "failed", "skipped")}
        return {"name": self.name, "version": self.version, **counts, "failures": failures}


@dataclass(frozen=True, slots=True)
class _Target:
    name: str
    version: str = ""
    folder: Path | None = None


def check_plugins(targets: Sequence[str] = ()) -> list[Checked]:
    """Check plugins by name or by the folder of their pyproject.toml; without targets, all installed plugins.

    A pyproject.toml without a plugin is a failed check. Raises UsageError for other targets.
    """
    targets_found = [each for target in targets or sorted(installed(plugins.GROUP)) for each in _find_targets(target)]
    results: list[Checked] = []
    for start in range(0, len(targets_found), AT_ONCE):
        with TemporaryDirectory(prefix="flagcore-check-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
            started = [stack.enter_context(_started(each, folder)) for each in targets_found[start : start + AT_ONCE]]
            results += [_read_results(*each) for each in started]
    return results


def _find_targets(target: str) -> list[_Target]:
    points = installed(plugins.GROUP)
    if target in points:
        return [_Target(target, origin(points[target][0]).version)]
    folder = Path(target).resolve()
    if (folder / "pyproject.toml").is_file():
        try:
            package = read_source(folder)
        except UsageError:  # the check that it loads reports it
            return [_Target(folder.name, folder=folder)]
        return [_Target(name, package.version, folder) for name in package.points]
    matches = get_close_matches(target, points, n=1)
    hint = f"did you mean {matches[0]}?" if matches else f"installed: {', '.join(sorted(points)) or 'none'}"
    raise UsageError(f"{target} is neither an installed plugin nor a folder with a pyproject.toml; {hint}")


@contextmanager
def _started(each: _Target, folder: str) -> Iterator[tuple[_Target, Path, subprocess.Popen[bytes]]]:
    """Start the checks of a plugin, and end all its processes at the end of the context."""
    report = Path(folder, f"{each.name}.jsonl")
    options = {"report": report, "plugin": each.name, "seconds": CHECK_SECONDS, "folder": each.folder or ""}
    argv = [*PYTEST, *(f"--flagcore-{name}={value}" for name, value in options.items())]
    # TMPDIR: a check that is ended cannot delete its files
    environment = {**os.environ, "TMPDIR": folder, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": environment}
    process = subprocess.Popen(argv, start_new_session=True, **quiet)
    try:
        yield each, report, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_results(each: _Target, report: Path, process: subprocess.Popen[bytes]) -> Checked:
    """Return the results, and a failure for the check during which the process ended or hung."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS)
    records: list[dict[str, str]] = []
    with suppress(OSError, ValueError):  # the last line may be cut
        records += map(json.loads, report.read_text("utf-8").splitlines())
    results = [record for record in records if "state" in record]
    code = process.poll()
    if not any("ends" in record for record in records):
        current_check = next((record["begins"] for record in reversed(records) if "begins" in record), "the start")
        if code in (None, -signal.SIGALRM):
            outcome = f"it took more than {SECONDS if code is None else CHECK_SECONDS:.0f} s"
            fix = "limit the time of every wait, and do not nest repetitions in patterns"
        else:
            status = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            outcome = f"{status} ended the process"
            fix = "call native libraries in a separate process (flagcore.vendorkit.machine), with a timeout"
        message = f"{each.name}: {outcome} during this check; later checks did not run"
        results.append({"check": current_check, "state": "failed", "message": message, "fix": fix})
    return Checked(each.name, each.version, tuple(results))


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
        if each.get("places"):
            yield "    " + _("at {places}", places=each["places"])
        yield "    " + _("fix: {fix}", fix=each["fix"])
    reasons: dict[str, list[str]] = {}
    for each in plugin.of("skipped"):
        reasons.setdefault(each["message"], []).append(each["check"])
    for reason, checks in reasons.items():
        remainder = " " + _("and {count} more", count=len(checks) - 1) if len(checks) > 1 else ""
        yield "  " + _("skipped: {checks}: {reason}", checks=checks[0] + remainder, reason=reason)
