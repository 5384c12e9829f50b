"""`flagcore.api.commands.tune` on a tiny model that megatron-core really trains."""

import json
from importlib.util import find_spec
from statistics import median
from typing import Any

import pytest
import yaml

from flagcore import api
from tests.product.tasks import SHAPE

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron"),
    pytest.mark.slow,
    pytest.mark.together("training"),
]

SPEC: dict[str, Any] = {
    "model": {**SHAPE, "name": "tiny", "num_layers": 5, "num_query_groups": 2},
    "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "2GiB"},
    "train": {"engine": "megatron", "seq_length": 32, "global_batch_size": 8, "precision": "fp32"},
    "auto_tuner": {
        "baseline": {"pipeline_model_parallel_size": 2, "layer_split": "balanced", "micro_batch_size": 1},
        "space": {"micro_batch_size": [1, 4], "use_recompute": False, "num_layers_per_virtual_pipeline_stage": None},
        "control": {"train_iters": 4, "warmup_iters": 1, "max_trials": 2, "repeats": 0},
    },
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> api.Outcome:
    folder = tmp_path_factory.mktemp("tune")
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    return api.tune(folder / "spec.yaml", run_dir=folder / "run")


def test_trials_train_the_requested_model(tuned: api.Outcome) -> None:
    for trial in tuned.data["trials"]:
        assert trial["state"] in ("measured", "stopped"), trial["reason"]
        if trial["state"] == "measured":
            effective = trial["measured"]["effective"]
            same = [effective[knob] == value for knob, value in trial["candidate"].items() if knob in effective]
            assert all(same)
            assert len(same) > 8
            assert len(trial["measured"]["losses"]) == 4


def test_layers_that_do_not_divide_run_with_the_split_that_was_predicted(tuned: api.Outcome) -> None:
    (baseline, *_) = tuned.data["trials"]
    metrics = json.loads((tuned.run_dir / "trials" / "0" / "metrics.json").read_text())
    assert metrics["effective"]["layers_per_stage"] == baseline["predicted"]["stage_layers"]
    assert sum(metrics["effective"]["layers_per_stage"]) == 5


def test_figures_come_from_the_files_of_the_trial(tuned: api.Outcome) -> None:
    best = tuned.data["best"]
    metrics = json.loads((tuned.run_dir / "trials" / str(best["number"]) / "metrics.json").read_text())
    times = [step["step_time_s"] for step in metrics["steps"]][1:]
    assert best["measured"]["step_time_s"]["median"] == median(times)
    assert best["measured"]["tokens_per_second_per_device"] == pytest.approx(8 * 32 / median(times) / 2)
    used = max(rank["device_used_bytes"] for rank in metrics["ranks"])
    assert best["measured"]["device_used_gib"] == pytest.approx(used / 2**30)
    speeds = [rank["speed_test_s"] for rank in metrics["ranks"]]
    assert [each["speed_test_s"] for each in best["measured"]["devices"]] == speeds
    assert min(speeds) > 0


def test_all_trials_start_warm(tuned: api.Outcome) -> None:
    assert all(trial["warm"] for trial in tuned.data["trials"])
