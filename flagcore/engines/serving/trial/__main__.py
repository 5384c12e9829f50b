"""Entry point: `python -m flagcore.engines.serving.trial FOLDER`.

It serves the candidate in FOLDER/serve.json, sends the load and writes FOLDER/metrics.json. On a failure it writes no
metrics, the exit code is not 0, and the last line on stderr is the class of the failure (`out of memory:`, `invalid
configuration:`, `timed out:` or `failed:`) with the reason. Each server logs into FOLDER/instance-N.log.
"""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path

from flagcore.domain.trial import TrialState
from flagcore.engines.results import METRICS
from flagcore.engines.serving.trial.failures import TrialFailure
from flagcore.engines.serving.trial.job import read_job

CODES = {TrialState.FAILED: 1, TrialState.INVALID: 2, TrialState.OUT_OF_MEMORY: 3, TrialState.TIMED_OUT: 4}


def main(arguments: list[str]) -> int:
    """Run the trial in the folder of the command line and return the exit code."""
    try:
        if len(arguments) != 1:
            raise ValueError("usage: python -m flagcore.engines.serving.trial FOLDER")
        folder = Path(arguments[0])
        (folder / METRICS).unlink(missing_ok=True)  # remove the metrics of an earlier run
        job = read_job(folder)
    except (OSError, ValueError) as error:
        return report(TrialFailure(TrialState.INVALID, str(error)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        from flagcore.engines.serving.trial.program import run

        run(job, folder)
    except TrialFailure as failure:
        return report(failure)
    except Exception as error:
        traceback.print_exc()
        return report(TrialFailure(TrialState.FAILED, f"{type(error).__name__}: {error}"))
    return 0


def report(failure: TrialFailure) -> int:
    """Print a failure as the last line on stderr, and return its exit code."""
    print(failure, file=sys.stderr, flush=True)
    return CODES[failure.state]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
