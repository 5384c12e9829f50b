"""Logs each trial as a run of Weights & Biases, in a group with the name of the run.

The variables of Weights & Biases select the project and the mode (WANDB_PROJECT, WANDB_MODE, WANDB_DIR).
"""

import os
import re

from flagcore.domain.trial import TRIAL_FINISHED, RunEvent
from flagcore_watchers import about, metrics, params

try:
    import wandb
except ImportError as error:
    raise ImportError("run `pip install 'flagcore[wandb]'`") from error


def on_event(event: RunEvent) -> None:
    """Log a trial that has ended. If a trial is logged again, it replaces the earlier log."""
    trial = event.trial
    if event.kind != TRIAL_FINISHED or trial is None:
        return
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "flagcore"),
        group=event.run,
        name=f"{event.run} trial {trial['number']}",
        id=re.sub(r"[^A-Za-z0-9_-]", "-", f"{event.run}-{trial['number']}"),
        dir=os.environ.get("WANDB_DIR", event.folder),
        config={**params(trial), **about(trial), "job": dict(event.job)},
        reinit="create_new",
        resume="allow",
        settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
    )
    run.log(metrics(trial))
    run.finish(exit_code=0 if trial["state"] in ("measured", "stopped") else 1)
