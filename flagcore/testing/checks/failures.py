"""Failure patterns: log lines of failed trials."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files

from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.testing.kit import Problems, Skip, Subject, check

HEALTHY = files(__package__).joinpath("healthy.log").read_text("utf-8").splitlines()
"""Lines of successful runs."""

SECONDS = 10.0
"""Time limit of all patterns together on long lines."""
_TRY = """
import json, re, sys
for pattern in json.load(sys.stdin):
    print(json.dumps(pattern), flush=True)
    compiled = re.compile(pattern)
    words = re.findall(r"[A-Za-z]{3,}", pattern)[:3]
    for piece in ["a", " ", "0", "a ", ":", "a:", *words, *(word + " " for word in words)]:
        compiled.search((piece * 4000)[:8000] + "!")
    for letter in sorted(set(re.findall(r"[^\\W_]", pattern))):
        compiled.search(letter * 400 + "!")
"""


@check("do not nest repetitions, as in (a+)+")
def failure_patterns_are_fast(plugin: Subject) -> Problems:
    if not _patterns(plugin):
        raise Skip("the plugin has no failure patterns")
    if slow := _slow_pattern(plugin):
        yield f"flagcore_failure_patterns: {slow!r} takes more than {SECONDS:.0f} s on a line of 8,000 characters"


@check("correct the pattern or the example, or put the narrower pattern first")
def failure_examples_match(plugin: Subject) -> Problems:
    failures = plugin.quirks.failures
    if not failures:
        raise Skip("quirks.yaml has no failures")
    if plugin.failed("flagcore_failure_patterns"):
        raise Skip("flagcore_failure_patterns has no valid answer")
    if plugin.chips:
        _require_fast_patterns(plugin)
    for place, each in enumerate(failures):
        engines = {*each.engines}
        same_engines = [
            other_match
            for other_match in failures
            if not engines or not other_match.engines or engines & {*other_match.engines}
        ]
        first = next(
            (other_match for other_match in same_engines if re.search(other_match.pattern, each.example)), None
        )
        if first is not each:
            other_match = f"the earlier pattern {first.pattern!r} does" if first else "none does"
            yield f"quirks.yaml: failures[{place}].example is not matched by its own pattern: {other_match}"


@check("correct the pattern or the order of the patterns")
def log_examples_match(plugin: Subject) -> Problems:
    patterns = _patterns(plugin)
    if not plugin.examples:
        raise Skip("there are no log lines in addition to those of quirks.yaml: override the fixture failure_examples")
    _require_fast_patterns(plugin)
    ordered = sorted(patterns, key=lambda pattern: pattern.state is not TrialState.OUT_OF_MEMORY)
    for line, state in plugin.examples:
        first = next((pattern for pattern in ordered if re.search(pattern.pattern, line)), None)
        if first is None or first.state is not state:
            matched_text = f"as {first.state.value}" if first else "by no pattern"
            yield f"flagcore_failure_patterns: {line!r} is matched {matched_text}, not as {state.value}"


@check("match more of the failure's text")
def failure_patterns_ignore_healthy_logs(plugin: Subject) -> Problems:
    _require_fast_patterns(plugin)
    for pattern in _patterns(plugin):
        for line in HEALTHY:
            if re.search(pattern.pattern, line):
                yield f"flagcore_failure_patterns: {pattern.pattern!r} matches {line.strip()!r} of a successful run"


def _patterns(plugin: Subject) -> Sequence[FailurePattern]:
    patterns = [pattern for pair in plugin.pairs() for pattern in plugin.loaded.failure_patterns(*pair)]
    return tuple(dict.fromkeys(patterns))


def _slow_pattern(plugin: Subject) -> str:
    """Return the first slow pattern, searched for in a separate process; empty if there is none."""

    def _match_in_process() -> str:
        patterns = [pattern.pattern for pattern in _patterns(plugin)]
        argv, text = [sys.executable, "-I", "-S", "-c", _TRY], json.dumps(patterns)
        try:
            subprocess.run(argv, input=text, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            return str(json.loads(output.splitlines()[-1]) if output else patterns[0])
        return ""

    return plugin.once("slow pattern", _match_in_process)


def _require_fast_patterns(plugin: Subject) -> None:
    """Raise Skip if a pattern is too slow to be tried."""
    if _slow_pattern(plugin):
        raise Skip("a pattern takes too long to be tried on lines")
