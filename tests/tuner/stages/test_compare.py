"""What becomes of a trial after its answers are compared with the baseline's."""

from dataclasses import replace
from typing import Any

import pytest
from flagcore_testing.toy import Toy

from flagcore.domain.spec import Task
from flagcore.domain.trial import Answers, Measurement, Role, Shortened, Trial, TrialState
from flagcore.errors import FlagError
from flagcore.tuner.stages.compare import compare
from tests import tasks

MEASURED = Measurement(step_times_s=(1.0,), step_time_s=1.0, spread_s=0.0, tokens_per_second_per_device=1.0)
BASE = Trial(
    number=0,
    candidate=tasks.candidate(),
    role=Role.BASELINE,
    state=TrialState.MEASURED,
    measurement=MEASURED,
)
OTHER = replace(BASE, number=1, candidate=tasks.candidate(micro_batch_size=2), role=Role.SEARCH)
FAR = Answers(difference=2.0, limit=1.0, unit="of it", text="loss 2 instead of 1")
HALF = Shortened(global_batch_size=4, whole=8, scale=2.0, low=1.9, high=2.1)


class Engine(Toy):
    """An engine whose trials have `found` as answers."""

    def __init__(self, found: Answers | str | None) -> None:
        self.found, self.change = found, ""

    def answers(self, task: Task, change: str, folder: str, baseline: str) -> Answers | None:
        self.change = change
        if isinstance(self.found, str):
            raise FlagError(self.found)
        return self.found


@pytest.mark.parametrize(
    ("found", "state", "reason"),
    [
        (None, TrialState.MEASURED, None),
        (replace(FAR, difference=1.0), TrialState.MEASURED, None),
        (replace(FAR, difference=float("nan")), TrialState.INVALID, "loss 2 instead of 1"),
        (FAR, TrialState.INVALID, "loss 2 instead of 1"),
        ("nothing to compare", TrialState.INVALID, "nothing to compare"),
    ],
)
def test_a_trial_with_other_answers_is_invalid(found: Any, state: TrialState, reason: str | None) -> None:
    engine = Engine(found)
    done = compare(replace(tasks.platform(tasks.task()), engine=engine), OTHER, BASE, ("1", "0"))
    assert (done.state, engine.change) == (state, "rounding")
    assert (reason or "") in (done.reason or "")
    if found is not None and not isinstance(found, str):
        assert done.measurement is not None
        assert done.measurement.answers is found


@pytest.mark.parametrize(
    ("trial", "base"),
    [
        (replace(BASE, number=1, role=Role.REPEAT), BASE),
        (replace(OTHER, shortened=HALF), BASE),
        (replace(OTHER, state=TrialState.STOPPED), BASE),
        (OTHER, replace(BASE, state=TrialState.OUT_OF_MEMORY, measurement=None)),
    ],
)
def test_what_cannot_be_compared_is_not(trial: Trial, base: Trial) -> None:
    engine = Engine(FAR)
    platform = replace(tasks.platform(tasks.task()), engine=engine)
    assert compare(platform, trial, base, ("1", "0")) == trial
    assert engine.change == ""
