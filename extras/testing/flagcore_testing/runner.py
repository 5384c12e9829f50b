"""Runs the conformance kit on plugins, each in a separate process. A crash of the process is a failed check.

The process is `python -m flagcore_testing.runner NAME FOLDER REPORT SECONDS`. Its report contains one line of JSON for
each step: `{"begins": CHECK}` before a check, then its result, and `{"ends": true}` at the end. If the plugin ends the
process, the check that began last has failed.
"""

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flagcore import plugins
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.loading.entry_points import installed, one_line, origin
from flagcore.plugins.entry_points import load_only
from flagcore_testing.by_hand import facts_by_hand
from flagcore_testing.kit import Subject, run
from flagcore_testing.package import read_source

SECONDS = 1800.0
"""Time limit of all checks of one plugin, in seconds."""
CHECK_SECONDS = 400.0
"""Time limit of one check in seconds. It is far above the time of checks on a busy machine."""
AT_ONCE = max(1, min(4, os.cpu_count() or 1))
"""Number of plugins that are checked at the same time."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A plugin with the result of each check: `check`, `state` (passed, failed, skipped), `message` and `fix`.

    `by_hand`: facts that no check can confirm.
    """

    name: str
    version: str
    results: tuple[dict[str, str], ...]
    by_hand: tuple[str, ...] = ()

    def of(self, state: str) -> list[dict[str, str]]:
        """Return the results of one state."""
        return [result for result in self.results if result["state"] == state]

    @property
    def record(self) -> dict[str, Any]:
        """The counts, and the failures with their fixes."""
        keys = ("check", "message", "fix", "places")
        failures = [{key: result.get(key, "") for key in keys} for result in self.of("failed")]
        counts = {state: len(self.of(state)) for state in ("passed", "failed", "skipped")}
        by_hand = list(self.by_hand)
        return {"name": self.name, "version": self.version, **counts, "failures": failures, "by_hand": by_hand}


@dataclass(frozen=True, slots=True)
class _Target:
    name: str
    version: str = ""
    folder: Path | None = None


def check_plugins(targets: Sequence[str] = ()) -> list[Checked]:
    """Check plugins by name or by the folder of their pyproject.toml. Without targets, check all installed plugins.

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
    arguments = map(str, (each.name, each.folder or "", report, CHECK_SECONDS))
    argv = [sys.executable, "-m", "flagcore_testing.runner", *arguments]
    environment = {**os.environ, "TMPDIR": folder}  # a check that is ended cannot delete its files
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
    records: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):  # the last line may be incomplete
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
            fix = "call native libraries in a separate process (flagcore_vendorkit.machine), with a timeout"
        message = f"{each.name}: {outcome} during this check; later checks did not run"
        results.append({"check": current_check, "state": "failed", "message": message, "fix": fix})
    facts = next((record["by_hand"] for record in records if "by_hand" in record), ())
    return Checked(each.name, each.version, tuple(results), tuple(facts))


def as_text(checked: Sequence[Checked]) -> str:
    """Return one paragraph per plugin: the counts, failures with their fixes, skipped checks, facts to confirm."""
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
    for fact in plugin.by_hand:
        yield "  " + _("confirm by hand: {fact}", fact=fact)


def _run_checks(name: str, folder: str, report: Path, seconds: float) -> None:
    """Run all checks of a plugin. A check that takes longer than `seconds` ends the process, even in native code."""
    from flagcore_testing.checks import CHECKS

    logging.lastResort, logging.root.manager.emittedNoHandlerWarning = None, True  # checks cause errors on purpose
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def write(record: object) -> None:
        with report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    subject: Subject | None = None
    for check in CHECKS:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        write({"begins": check.__name__})
        subject = subject or _imported(name, Path(folder) if folder else None)
        write(asdict(run(check, subject)))
    with suppress(Exception):  # a plugin that does not load has no facts
        write({"by_hand": list(facts_by_hand(subject))} if subject else {})
    write({"ends": True})


def _imported(name: str, folder: Path | None) -> Subject:
    """Import the plugin. Another check reports an error of the import."""
    try:
        if folder is None:
            points = installed(plugins.GROUP)[name]
            return Subject(name=name, hooks=load_only(points), distribution=points[0].dist)
        package = read_source(folder)
        sys.path[:0] = [str(folder), str(folder / "src")]
        module, _, attribute = package.points[name].partition(":")
        hooks = importlib.import_module(module)
        return Subject(name=name, hooks=getattr(hooks, attribute) if attribute else hooks)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        subject = Subject(name=name, hooks=None)
        failure = plugins.PluginFailure(name=name, stage="load", reason=one_line(error))
        subject.loaded = plugins.LoadedPlugins([failure])
        return subject


if __name__ == "__main__":
    _run_checks(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
    os._exit(0)  # threads that the plugin started may keep the process alive
