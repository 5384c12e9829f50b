"""Entry point of the trial program: `python -m flagcore_megatron.trial JOB.json`."""

import sys
from functools import partial

from flagcore_training.trial import program
from flagcore_training.trial.forked_ranks import exit_at_once

from flagcore_megatron.trial.job import parse_job

RANK = "flagcore_megatron.trial.rank"
main = partial(program.main, read=parse_job, rank=RANK)
ready = partial(program.ready, read=parse_job, rank=RANK)

if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
