"""Failure patterns for the logs of a trial: flagcore's trial program, Megatron-LM, and torchrun.

The first pattern that matches a line counts, so the most specific patterns come first. torchrun prints its own error
after the cause.
"""

from __future__ import annotations

from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState

RANK_PREFIX = r"^(?:\[[\w:]+\]:\s*)*"
"""The prefixes that torchrun and torch add to a line of a rank: `[default0]:[rank0]: `."""
PEER_FAILURE = r"gloo|NCCL|ncclRemoteError|Connection (?:reset|closed)|Broken pipe"
"""Matches lines of a rank whose peer failed."""


def _line(pattern: str, state: TrialState, advice: str = "") -> FailurePattern:
    return FailurePattern(pattern=f"{RANK_PREFIX}(?P<reason>{pattern})", state=state, advice=advice)


TE_ADVICE = "transformer-engine is not installed: use --transformer-impl local"
TE_MISSING = r"NameError: name 'TE\w+' is not defined.*|.*No module named 'transformer_engine'.*"
ANY_ERROR = r"(?!torch\.distributed\.elastic)(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?:: .+)?$"

FAILURES = (
    FailurePattern(pattern=r"^out of memory:", state=TrialState.OUT_OF_MEMORY),
    _line(r"(?:\w+\.)*OutOfMemoryError: .*", TrialState.OUT_OF_MEMORY),
    _line(r".*(?:OutOfMemoryError|can't allocate memory).*", TrialState.OUT_OF_MEMORY),
    FailurePattern(pattern=r"^invalid configuration:", state=TrialState.INVALID),
    _line(r"[\w./-]+\.py: error: .*", TrialState.INVALID),
    _line(r".*(?:Watchdog caught collective operation timeout|Timed out waiting \d+ms).*", TrialState.TIMED_OUT),
    _line(r".*(?:No space left on device|Read-only file system).*", TrialState.FAILED),
    FailurePattern(
        pattern=r"(?P<reason>(?:Unexpected result \w+ .*)?found (?:NaN|Inf) in local .*)", state=TrialState.FAILED
    ),
    _line(TE_MISSING, TrialState.FAILED, TE_ADVICE),
    _line(r"(?:AssertionError|ValueError|NotImplementedError): .+", TrialState.INVALID),
    _line(r"assert .+", TrialState.INVALID),
    _line(rf"(?!.*(?:{PEER_FAILURE})){ANY_ERROR}", TrialState.FAILED),
    FailurePattern(
        pattern=r"(?P<reason>failed \(exitcode: -\d+\) local_rank: \d+)",
        state=TrialState.FAILED,
        advice="a signal ended this rank; the exit code is its negative number",
    ),
    FailurePattern(pattern=f"{RANK_PREFIX}(?P<reason>{ANY_ERROR})", state=TrialState.FAILED, weak=True),
)
