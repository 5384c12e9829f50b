"""The default baseline of the reported gain."""

from dataclasses import replace

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE

from flagcore.contracts import Problem
from flagcore.tuner.feasibility import crowded_baseline_text
from flagcore.tuner.problem import UNUSUAL_SHARE, build_problem, recommended_row, rows_by_time
from flagcore.tuner.stages.build import PLANNED_SHARE
from tests.product import tasks
from tests.tuner.stages.test_discover import loaded, plugin, spec


def problem(memory_bytes: int | None = None) -> Problem:
    requested = spec()
    cluster = replace(requested.cluster, memory_bytes_per_device=memory_bytes)
    return build_problem(replace(requested, cluster=cluster), loaded(x=plugin(tasks.CHIP, 8)), ENGINE)


def test_the_rule_of_thumb_chooses_a_candidate_that_fits_if_one_does() -> None:
    found = problem()
    less = problem(int(float(found.predictions.device_used_bytes[found.row_of(found.baseline)])) - 1)
    assert less.predictions.fits[less.row_of(less.baseline)]


def test_plans_list_candidates_without_a_margin_of_memory_last_unless_the_user_set_the_budget() -> None:
    found = problem()
    order = rows_by_time(found)
    used = found.predictions.device_used_bytes[order]
    capacity_bytes = float(np.median(used)) / PLANNED_SHARE
    small_device = replace(found, predictions=replace(found.predictions, capacity_bytes=capacity_bytes))
    has_margin = used <= np.median(used)
    assert 0 < has_margin.sum() < order.size
    assert rows_by_time(small_device).tolist() == [*order[has_margin], *order[~has_margin]]
    spec = replace(found.task.spec, cluster=replace(found.task.spec.cluster, memory_bytes_per_device=2**30))
    budget = replace(small_device, platform=replace(found.platform, task=replace(found.task, spec=spec)))
    assert rows_by_time(budget).tolist() == order.tolist()


def test_a_baseline_that_is_predicted_not_to_fit_is_tried_with_a_reason() -> None:
    found = problem()
    used = float(found.predictions.device_used_bytes[found.row_of(found.baseline)])
    assert crowded_baseline_text(found) == ""
    small_device = replace(found, predictions=replace(found.predictions, capacity_bytes=used - 1))
    assert f"{used / 2**30:.4g} of" in crowded_baseline_text(small_device)


def test_a_usual_candidate_that_is_about_as_fast_is_recommended_and_listed_by_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = problem()
    first, second = rows_by_time(found)[:2]
    monkeypatch.setattr(type(ENGINE), "unusual", lambda _engine, _task, _columns, rows: 1.0 * (rows.step_time_s == 1))
    step_time_s = 10 + found.predictions.step_time_s
    step_time_s[first] = 1
    for faster, expected in ((0.5, second), (1.5, first)):
        step_time_s[second] = 1 + faster * UNUSUAL_SHARE
        changed = replace(found, predictions=replace(found.predictions, step_time_s=step_time_s))
        assert rows_by_time(changed)[:2].tolist() == [first, second]
        assert recommended_row(changed) == expected


def test_a_baseline_that_the_spec_excludes_comes_last() -> None:
    requested = replace(spec(), space={"micro_batch_size": (4,)})
    found = build_problem(requested, loaded(x=plugin(tasks.CHIP, 8)), ENGINE)
    assert found.baseline.as_dict()["micro_batch_size"] != 4
    assert rows_by_time(found)[-1] == found.row_of(found.baseline)
