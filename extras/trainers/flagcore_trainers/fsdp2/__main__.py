"""Entry point of the trial program: `python -m flagcore_trainers.fsdp2 JOB.json`.

It starts, ends and reports as `flagcore.engines.megatron.trial` does.
"""

import sys
from functools import partial

from flagcore.engines.forked_ranks import exit_at_once
from flagcore.engines.megatron.trial import __main__ as program
from flagcore_trainers.fsdp2.job import read_job

main, ready = (
    partial(each, read=read_job, rank="flagcore_trainers.fsdp2.rank") for each in (program.main, program.ready)
)

if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
