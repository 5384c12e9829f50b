"""Checks of the patterns of log lines of failed trials."""

import re
from collections.abc import Sequence
from importlib.resources import files

from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check, need, wrong

FAILED = (TrialState.OUT_OF_MEMORY, TrialState.FAILED, TrialState.TIMED_OUT, TrialState.INVALID)
NO_MEMORY = re.compile(r"out of (device )?memory|OutOfMemory", re.I)
HEALTHY = files(__package__).joinpath("healthy.log").read_text("utf-8").splitlines()
"""Log lines of successful runs, which no failure pattern may match."""
NESTED = re.compile(r"\([^()]*[^\\()][+*][^()]*\)[+*{]")
"""A repetition within a repetition, such as (a+)+, whose time grows exponentially with the length of a line."""
OTHER_ERRORS = (
    "RuntimeError: {0} error: an illegal memory access was encountered",
    "RuntimeError: {0} error: device-side assert triggered",
    "RuntimeError: {0} error: unspecified launch failure",
    "RuntimeError: {0} driver error: the device was lost",
)
"""Errors of a device, by its name, that say nothing about free memory."""


@check()
def failures_have_their_pattern_and_state(plugin: Subject) -> Problems:
    for place, each in enumerate(plugin.quirks.failures):
        is_memory, example, shown = each.state is TrialState.OUT_OF_MEMORY, each.example, f"state = {each.state.value}"
        state = "write state: out_of_memory, from which the search learns; other states end a candidate only"
        yield from wrong(
            (NESTED.search(each.pattern), f"pattern = {each.pattern!r} nests repetitions",
             "repeat only once: write [a-z ]+ and not ([a-z]+ ?)+"),
            (each.state not in FAILED, f"{shown}, which is no failure", state),
            (is_memory and not re.search("memory|alloc|oom|resource", example, re.I),
             f"{shown}, but its example, {example[:80]!r}, is of none", state),
            (not is_memory and NO_MEMORY.search(example), f"{shown}, but its example is {example[:80]!r}", state),
            where=f"quirks.yaml: failures[{place}].",
        )  # fmt: skip


@check("correct the pattern or the example, or put the narrower pattern first")
def failure_examples_match(plugin: Subject) -> Problems:
    failures = need(plugin.quirks.failures, "quirks.yaml has no failures")
    need(not any(NESTED.search(each.pattern) for each in failures), "a pattern nests repetitions")
    need(not plugin.failed("flagcore_check_task"), "flagcore_check_task has no valid answer")
    for place, each in enumerate(failures):
        engines = {*each.engines}
        alike = [one for one in failures if not engines or not one.engines or engines & {*one.engines}]
        first = next((one for one in alike if re.search(one.pattern, each.example)), None)
        if first is not each:
            other = f"the earlier pattern {first.pattern!r} does" if first else "none does"
            yield f"quirks.yaml: failures[{place}].example is not matched by its own pattern: {other}"


@check("match more of the failure's text")
def failure_patterns_match_only_their_failures(plugin: Subject) -> Problems:
    names = {"CUDA", "HIP", *(plugin.loaded.engine_support(*pair).device_type or "" for pair in plugin.pairs())}
    lines = [line.format(name.upper()) for name in sorted(names) if name for line in OTHER_ERRORS]
    for pattern in _patterns(plugin):
        shown, is_memory = f"flagcore_check_task: {pattern.pattern!r}", pattern.state is TrialState.OUT_OF_MEMORY
        for line in (line for line in HEALTHY if re.search(pattern.pattern, line)):
            yield f"{shown} matches {line.strip()!r} of a successful run"
        for line in (line for line in lines if is_memory and re.search(pattern.pattern, line)):
            fix = "match the words about memory only: a search avoids larger candidates after such a failure"
            yield Problem(f"{shown} matches {line!r}, which is no lack of memory", fix)


@check("correct the pattern or the order of the patterns")
def log_examples_match(plugin: Subject) -> Problems:
    patterns = _patterns(plugin)
    if not plugin.examples:
        raise Skip("there are no log lines in addition to those of quirks.yaml: override the fixture failure_examples")
    ordered = sorted(patterns, key=lambda pattern: pattern.state is not TrialState.OUT_OF_MEMORY)
    for line, state in plugin.examples:
        first = next((pattern for pattern in ordered if re.search(pattern.pattern, line)), None)
        if first is None or first.state is not state:
            matched_text = f"as {first.state.value}" if first else "by no pattern"
            yield f"flagcore_check_task: {line!r} is matched {matched_text}, not as {state.value}"


def _patterns(plugin: Subject) -> Sequence[FailurePattern]:
    patterns = [pattern for task in plugin.tasks() for pattern in plugin.loaded.check_task(task).failures]
    need(not any(NESTED.search(each.pattern) for each in patterns), "a pattern nests repetitions")
    return tuple(dict.fromkeys(patterns))
