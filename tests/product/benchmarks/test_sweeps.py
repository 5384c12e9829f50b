"""Measured records become tuning tasks that `flag tune` would recognise, predicted by a model that never saw them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flagcore import api
from flagcore.api.inputs import loaded_plugins
from flagcore.plugins import LoadedPlugins
from tests.product.tasks import SHAPE

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sweeps

    yield sweeps
    for name in ("sweeps", "fit_curves", "wrong_models", "searchers", "flagscale_rules"):
        sys.modules.pop(name, None)


@pytest.fixture
def loaded() -> Iterator[LoadedPlugins]:
    with loaded_plugins(()) as found:
        yield found


def records(**changes: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{tensor} {micro_batch}",
            "source": "Made up",
            "kind": "train",
            "model": SHAPE,
            "cluster": {"chip": "cpu", "devices": 4, "devices_per_node": 4},
            "train": {"seq_length": 128, "global_batch_size": 32, "precision": "bf16"},
            "candidate": {"tensor_model_parallel_size": tensor, "micro_batch_size": micro_batch},
            "measured": {"step_time_s": float(tensor * micro_batch)},
            **changes,
        }
        for tensor in (1, 2, 4)
        for micro_batch in (1, 2, 4, 8)
    ]


def test_a_sweep_of_a_fitted_source_is_predicted_by_the_curve_of_the_fit_without_it(
    sweeps: Any, loaded: LoadedPlugins
) -> None:
    cluster = {"chip": "A100-80GB", "devices": 4, "devices_per_node": 4}
    source = "vTrain ground truth (A100)"
    (own,) = sweeps.read_sweeps(records(cluster=cluster, source=source), loaded)
    (unrelated,) = sweeps.read_sweeps(records(cluster=cluster), loaded)
    assert not np.allclose(own.problem.predictions.step_time_s, unrelated.problem.predictions.step_time_s, rtol=1e-6)
    fitted = json.loads((BENCHMARKS / "fitted.json").read_text(encoding="utf-8"))["ampere"]["sources"][source]
    curve = own.problem.platform.costs.kernels.curve
    assert {name: getattr(curve, name) for name in fitted["left_out_parameters"]} == fitted["left_out_parameters"]


def test_a_sweep_gets_the_predictions_of_its_records(sweeps: Any, loaded: LoadedPlugins) -> None:
    some = records()
    (sweep,) = sweeps.read_sweeps(some, loaded)
    by_id = {answer["id"]: answer["step_time_s"]["value"] for answer in api.estimate_jobs(some)}
    for row in range(len(sweep.problem.space)):
        values = sweep.problem.space.candidate(row).as_dict()
        name = f"{values['tensor_model_parallel_size']} {values['micro_batch_size']}"
        assert sweep.problem.predictions.step_time_s[row] == pytest.approx(by_id[name])
        assert sweep.seconds[row] == values["tensor_model_parallel_size"] * values["micro_batch_size"]
