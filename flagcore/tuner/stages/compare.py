"""compare: check that a trial has the answers of the baseline."""

from dataclasses import replace

from flagcore.contracts import Platform
from flagcore.domain.knob import ANSWERS
from flagcore.domain.trial import Trial, TrialState
from flagcore.errors import FlagError


def compare(platform: Platform, trial: Trial, baseline: Trial, folders: tuple[str, str]) -> Trial:
    """Return a measured trial with the difference of its answers to the baseline's, or as invalid if it is too large.

    `folders`: of both. Nothing is compared if the baseline was not measured, or steps of both have other samples.
    """
    cuts = {each.shortened and (each.shortened.global_batch_size, each.fewer_nodes) for each in (trial, baseline)}
    changed = {name for name, _value in {*trial.candidate.items} ^ {*baseline.candidate.items}}
    is_measured = trial.state is baseline.state is TrialState.MEASURED
    if not (is_measured and changed and trial.measurement) or len(cuts) > 1:
        return trial
    knobs = {each.name: each.answers for each in (*platform.engine.knobs, *platform.knobs)}
    change = max((knobs.get(name, ANSWERS[1]) for name in changed), key=ANSWERS.index)
    try:
        found = platform.engine.answers(platform.task.for_engine(), change, *folders)
    except FlagError as error:
        return replace(trial, state=TrialState.INVALID, reason=str(error))
    trial = replace(trial, measurement=replace(trial.measurement, answers=found))
    if found is None or found.difference <= found.limit:
        return trial
    return replace(trial, state=TrialState.INVALID, reason=f"other answers than the baseline: {found.text}")
