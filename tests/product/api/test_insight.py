"""What each value of each knob would cost: checked candidate by candidate."""

from typing import Any

import numpy as np
import pytest

from flagcore.api.commands import report as what_if_module
from flagcore.api.commands.report import insight, what_if
from flagcore.api.inputs import open_spec
from flagcore.contracts import Problem
from flagcore.domain.space import Candidate
from tests.product.cli.conftest import MODEL

SPEC: dict[str, Any] = {
    "model": {**MODEL, "num_layers": 8},
    "cluster": {"chip": "cpu", "devices_per_node": 4, "memory_per_device": "400MiB"},
    "train": {"engine": "megatron", "seq_length": 256, "global_batch_size": 8, "precision": "bf16"},
    "auto_tuner": {"space": {"context_parallel_size": 1}},
}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return open_spec(SPEC, None, ()).problem


def test_each_value_has_its_fastest_candidate(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if_module, "CHUNK", 100)  # so that what is found in one piece is set against the others
    rows, steps = np.flatnonzero(problem.predictions.fits), problem.predictions.step_time_s
    assert 0 < rows.size < len(problem.space)
    all_trials = [(problem.space.candidate(int(row)).as_dict(), float(steps[row])) for row in rows]
    best, _ = all_trials[len(all_trials) // 2]
    knobs_by_name = {knob["knob"]: knob for knob in what_if(problem, Candidate.of(best))}
    for name in best:
        values = {candidate[name] for candidate, _ in all_trials}
        if len(values) < 2:
            assert name not in knobs_by_name
            continue
        assert knobs_by_name[name]["best"] == best[name]
        assert {value["value"] for value in knobs_by_name[name]["values"]} == values
        for value in knobs_by_name[name]["values"]:
            device_passes = [(candidate, step) for candidate, step in all_trials if candidate[name] == value["value"]]
            assert value["candidates"] == len(device_passes)
            assert value["fastest"]["predicted"]["step_time_s"]["value"] == min(step for _, step in device_passes)
            assert value["fastest"]["candidate"][name] == value["value"]


def test_insight_reports_every_stage_and_adds_up_to_the_prediction(problem: Problem) -> None:
    staged = [
        row
        for row in range(len(problem.space))
        if problem.space.columns(np.array([row]))["pipeline_model_parallel_size"][0] == 4
    ]
    best = problem.space.candidate(staged[0])
    insight_data = insight(problem, best)
    assert [stage["rank"] for stage in insight_data["stages"]] == [0, 1, 2, 3]
    assert len(insight_data["pipelines"][0]["forward_s"]) == 4
    worst = max(insight_data["stages"], key=lambda stage: stage["device_used_gib"])
    assert worst["device_used_gib"] * 2**30 == pytest.approx(float(problem.predictions.device_used_bytes[staged[0]]))
    assert all(rule in insight_data["messages"] for rule in problem.space.illegal)
    assert all(fact["kind"] for chip in insight_data["chips"] for fact in chip["facts"])


def test_without_a_best_rules_and_chips_are_still_reported(problem: Problem) -> None:
    insight_data = insight(problem, None)
    assert insight_data["messages"]
    assert insight_data["chips"]
    assert "knobs" not in insight_data
