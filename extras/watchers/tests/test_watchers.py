"""Each tool reads back what its watcher wrote."""

from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.domain.trial import RUN_FINISHED, RUN_STARTED, TRIAL_FINISHED
from tests.product.cli.test_watchers import EVENT

pytestmark = pytest.mark.spread

pytest.importorskip("flagcore_watchers", reason="flagcore-watchers is not installed: `make setup`")


def test_tensorboard_reads_the_figures_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from flagcore_watchers import tensorboard
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    tensorboard.on_event(replace(EVENT, folder=str(tmp_path)))
    found = EventAccumulator(str(tmp_path / "tensorboard" / "trial-3"))
    found.Reload()
    (scalar,) = found.Scalars("measured.step_time_s.median")
    assert (scalar.step, scalar.value) == (3, 0.25)
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    knobs = HParamsPluginData.FromString(content).session_start_info.hparams
    assert (knobs["micro_batch_size"].number_value, knobs["state"].string_value) == (4.0, "measured")


@pytest.mark.slow
def test_mlflow_has_a_parent_and_a_run_per_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path))
    mlflow.set_tracking_uri(str(tmp_path))
    from flagcore_watchers.mlflow import MlflowWatcher

    for _ in range(2):  # the second time, the run is resumed
        watcher = MlflowWatcher()
        for kind in (RUN_STARTED, TRIAL_FINISHED, RUN_FINISHED):
            watcher.on_event(replace(EVENT, kind=kind))
    client = mlflow.MlflowClient()
    logged = client.search_runs([client.get_experiment_by_name("flagcore").experiment_id])
    (parent,) = [each for each in logged if "flagcore.run" in each.data.tags]
    children = [each for each in logged if each.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 2
    assert children[0].data.metrics["measured.step_time_s.median"] == 0.25
    assert children[0].data.params["micro_batch_size"] == "4"
    assert (parent.info.status, children[0].info.status) == ("FINISHED", "FINISHED")
    assert parent.data.metrics["best.measured.tokens_per_second_per_device"] == 1000.0


@pytest.mark.slow
def test_wandb_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from flagcore_watchers import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb.on_event(EVENT)
    (file,) = tmp_path.rglob("*.wandb")
    content = file.read_bytes()  # protobuf records, not compressed
    assert all(text in content for text in (b"own-1f", b"micro_batch_size", b"measured.step_time_s.median"))
