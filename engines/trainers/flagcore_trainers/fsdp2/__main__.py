"""Entry point of the trial program: `python -m flagcore_trainers.fsdp2 JOB.json`."""

import sys
from functools import partial

from flagcore_training.trial import program
from flagcore_training.trial.forked_ranks import exit_at_once

from flagcore_trainers.fsdp2.job import read

RANK = "flagcore_trainers.fsdp2.rank"
main = partial(program.main, read=read, rank=RANK)
ready = partial(program.ready, read=read, rank=RANK)

if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
