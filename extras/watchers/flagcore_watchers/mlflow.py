"""Logs a run to MLflow: a parent run, and a child run for each trial.

MLflow's own variables select the server and the experiment (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME).
"""

import os
from typing import Any

from flagcore.domain.trial import RUN_FINISHED, TRIAL_FINISHED, RunEvent
from flagcore_watchers import about, metrics, params

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
except ImportError as error:
    raise ImportError("run `pip install 'flagcore[mlflow]'`") from error

EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
RUN_TAG, PARENT_TAG, NAME_TAG = "flagcore.run", "mlflow.parentRunId", "mlflow.runName"
STATUS = {"measured": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}
"""MLflow's status for each state of a trial. Trials in other states have failed."""


class MlflowWatcher:
    """Logs events to MLflow, and remembers the experiment and the parent run of each run."""

    def __init__(self) -> None:
        self._client: Any = None
        self._parents: dict[str, tuple[str, str]] = {}

    def on_event(self, event: RunEvent) -> None:
        """Create the parent run, log a trial that has ended, or end the parent run, depending on the event."""
        self._client = self._client or MlflowClient()
        experiment, parent = self._parents.get(event.run) or self._begin(event)
        if event.kind == TRIAL_FINISHED and event.trial:
            self._log(event, experiment, parent)
        if event.kind == RUN_FINISHED:
            self._client.set_terminated(parent, "FINISHED" if event.best else "FAILED")

    def _begin(self, event: RunEvent) -> tuple[str, str]:
        """Return the experiment and the parent run of a run, which may be resumed."""
        name = os.environ.get(EXPERIMENT, "flagcore")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        earlier = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{event.run}'", max_results=1)
        if earlier:
            parent = earlier[0].info.run_id
            self._client.update_run(parent, "RUNNING")
        else:
            parent = self._client.create_run(experiment, tags={RUN_TAG: event.run, NAME_TAG: event.run}).info.run_id
            facts = [Param(key, str(value)) for key, value in event.job.items()]
            self._client.log_batch(parent, params=facts, tags=[RunTag("flagcore.folder", event.folder)])
        self._parents[event.run] = experiment, parent
        return experiment, parent

    def _log(self, event: RunEvent, experiment: str, parent: str) -> None:
        trial: Any = event.trial
        number, moment = int(trial["number"]), int(event.time * 1000)
        tags = {PARENT_TAG: parent, NAME_TAG: f"trial {number}"}
        child = self._client.create_run(experiment, start_time=moment - int(trial["duration_s"] * 1000), tags=tags)
        identifier = child.info.run_id
        self._client.log_batch(
            identifier,
            metrics=[Metric(name, value, moment, number) for name, value in metrics(trial).items()],
            params=[Param(name, str(value)) for name, value in params(trial).items()],
            tags=[RunTag(f"flagcore.{name}", value) for name, value in about(trial).items()],
        )
        self._client.set_terminated(identifier, STATUS.get(trial["state"], "FAILED"), end_time=moment)
        if event.best:
            best = [Metric(f"best.{name}", value, moment, number) for name, value in metrics(event.best).items()]
            self._client.log_batch(parent, metrics=best)


WATCHER = MlflowWatcher()
