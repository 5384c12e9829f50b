"""The text about repeats: rivals that cannot be distinguished from the best, and repeats without a measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.domain.plan import Counts, Plan, failed_repeats
from flagcore.domain.space import Candidate
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from flagcore.engines.megatron.space.knobs import BY_NAME
from flagcore.report.page.assembly import result_text
from flagcore.report.page.run import RunData
from flagcore.report.page.summary import MAX_RIVALS
from flagcore.report.result import result
from flagcore.tuner.stages.rank import learn

NONE: dict[str, object] = {"illegal": {}, "pruned": {}}


def trial(number: int, mbs: int, step: float, role: Role = Role.SEARCH) -> Trial:
    measured_trials = Measurement(
        step_times_s=(step,), step_time_s=step, spread_s=0.0, tokens_per_second_per_device=100.0 / step
    )
    candidate_of_trial = Candidate.of({"micro_batch_size": mbs})
    return Trial(
        number=number, candidate=candidate_of_trial, role=role, state=TrialState.MEASURED, measurement=measured_trials
    )


def run_data(plan: Plan) -> RunData:
    return RunData.from_json(result(plan, "run"), Path("run"), called="run", knobs=plan.knobs)


def plan_text(plan: Plan) -> str:
    return result_text(run_data(plan))


def plan(trials: list[Trial], rivals: int) -> Plan:
    search_state = learn(trials)
    return Plan(
        knobs=BY_NAME,
        chip="x",
        devices=1,
        objective="tokens_per_second_per_device",
        counts=Counts(**dict.fromkeys(Counts.__slots__, 0) | NONE),  # type: ignore[arg-type]
        trials=search_state.trials,
        repeats=search_state.repeats,
        baseline=search_state.baseline,
        best=search_state.best,
        gains=(),
        stopped_because="all is tried",
        medians={0: 1.0},
        rivals=search_state.trials[1 : 1 + rivals],
    )


@pytest.mark.parametrize(
    ("rivals", "reported"),
    [
        (0, None),
        (1, "trial 1 (MBS 1)"),
        (MAX_RIVALS + 2, "; ".join([*(f"trial {n} (MBS {n})" for n in range(1, 1 + MAX_RIVALS)), "and 2 more"])),
    ],
)
def test_every_rival_is_counted_whether_or_not_it_ran_again(rivals: int, reported: str | None) -> None:
    trials = [trial(0, 64, 1.0), *(trial(number, number, 1.01) for number in range(1, 9)), trial(9, 64, 1.0, REPEAT)]
    text = plan_text(plan(trials, rivals))
    assert (f"not significantly faster than {reported}." in text) if reported else ("significantly" not in text)


REPEAT = Role.REPEAT


def test_repeats_without_a_measurement_are_reported_outside_the_funnel() -> None:
    timed_out_repeat = replace(
        trial(2, 1, 1.0, REPEAT), state=TrialState.TIMED_OUT, measurement=None, reason="still running"
    )
    trials = [trial(0, 1, 1.0), trial(1, 1, 1.0, REPEAT), timed_out_repeat]
    assert failed_repeats(trials) == {2: "timed_out"}
    assert "1 failed repeat (trial 2 timed out)" in plan_text(plan(trials, 0))
    assert "failed repeat" not in plan_text(plan(trials[:2], 0))
