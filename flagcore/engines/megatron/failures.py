"""What log lines of a failed trial mean: of flagcore's own program, of Megatron-LM, and of torchrun around it.

The cause is above torchrun's own error; the first pattern with a line counts, so the most certain come first.
"""

from __future__ import annotations

from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState

RANK = r"^(?:\[[\w:]+\]:\s*)*"
"""What torchrun and torch write before a line of a rank: `[default0]:[rank0]: `."""
PEER = r"gloo|NCCL|ncclRemoteError|Connection (?:reset|closed)|Broken pipe"
"""Lines of a rank whose peer has failed."""


def _line(pattern: str, state: TrialState, advice: str = "") -> FailurePattern:
    return FailurePattern(pattern=f"{RANK}(?P<reason>{pattern})", state=state, advice=advice)


NO_TE = "transformer-engine is not installed: use --transformer-impl local"
TE_ABSENT = r"NameError: name 'TE\w+' is not defined.*|.*No module named 'transformer_engine'.*"
ANY_ERROR = r"(?!torch\.distributed\.elastic)(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?:: .+)?$"

FAILURES = (
    FailurePattern(pattern=r"^out of memory:", state=TrialState.OUT_OF_MEMORY),
    _line(r"(?:\w+\.)*OutOfMemoryError: .*", TrialState.OUT_OF_MEMORY),
    _line(r".*(?:OutOfMemoryError|can't allocate memory).*", TrialState.OUT_OF_MEMORY),
    FailurePattern(pattern=r"^invalid configuration:", state=TrialState.INVALID),
    _line(r"[\w./-]+\.py: error: .*", TrialState.INVALID),
    _line(r".*(?:Watchdog caught collective operation timeout|Timed out waiting \d+ms).*", TrialState.TIMED_OUT),
    _line(r".*No space left on device.*", TrialState.FAILED),
    FailurePattern(
        pattern=r"(?P<reason>(?:Unexpected result \w+ .*)?found (?:NaN|Inf) in local .*)", state=TrialState.FAILED
    ),
    _line(TE_ABSENT, TrialState.FAILED, NO_TE),
    _line(r"(?:AssertionError|ValueError|NotImplementedError): .+", TrialState.INVALID),
    _line(r"assert .+", TrialState.INVALID),
    _line(rf"(?!.*(?:{PEER})){ANY_ERROR}", TrialState.FAILED),
    FailurePattern(
        pattern=r"(?P<reason>failed \(exitcode: -\d+\) local_rank: \d+)",
        state=TrialState.FAILED,
        advice="this rank was ended by the signal of that number",
    ),
    FailurePattern(pattern=f"{RANK}(?P<reason>{ANY_ERROR})", state=TrialState.FAILED, weak=True),
)
