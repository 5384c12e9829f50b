"""Entry point: `python -m flagcore.engines.serving.trial FOLDER`.

It serves the candidate in FOLDER/serve.json, sends the load and writes FOLDER/metrics.json. On a failure it writes no
metrics, the exit code is not 0, and the last line on stderr is the class of the failure (`out of memory:`, `invalid
configuration:`, `timed out:` or `failed:`) with the reason. Each server logs into FOLDER/instance-N.log.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from pathlib import Path

import psutil

from flagcore.domain.trial import TrialState
from flagcore.engines.results import METRICS
from flagcore.engines.serving.launch.job import read_job
from flagcore.engines.serving.trial.failures import TrialFailure

CODES = {TrialState.FAILED: 1, TrialState.INVALID: 2, TrialState.OUT_OF_MEMORY: 3, TrialState.TIMED_OUT: 4}
MAX_AGE_SECONDS = 120.0
"""A higher age of this process is not credible: some containers report a wrong time of boot."""


def main(arguments: list[str], age_s: float = 0.0) -> int:
    """Run the trial in the folder of the command line, which began `age_s` seconds ago, and return the exit code."""
    began = time.monotonic() - age_s
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

        run(job, folder, began)
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
    age_s = time.time() - psutil.Process().create_time()
    sys.exit(main(sys.argv[1:], age_s if 0.0 < age_s < MAX_AGE_SECONDS else 0.0))
