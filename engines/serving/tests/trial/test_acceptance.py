"""The acceptance of drafted tokens that trials measure, in the predictions of other candidates."""

from dataclasses import replace

import numpy as np
import pytest
from flagcore_serving.trial.reading import acceptance, with_measured_acceptance
from flagcore_vllm.profile import ENGINE

from engines.serving.tests.engines.tasks import serving, space_of
from flagcore.contracts import Problem
from flagcore.domain.trial import Trial
from flagcore.tuner.problem import with_learned
from flagcore.tuner.stages.build import legality
from flagcore.tuner.stages.predict import predict
from flagcore.tuner.stages.prune import prune
from tests.product import tasks
from tests.serving_trials import trial

VALUES = {"speculation": "ngram", "speculative_tokens": 3}


def measured(tokens: float | None, **values: object) -> Trial:
    """A trial with a mean number of tokens per iteration."""
    found = trial(1, 100.0)
    assert found.measurement is not None
    figures = {**found.measurement.figures, **({} if tokens is None else {"drafted_share": 1.0 - 1.0 / tokens})}
    candidate = type(found.candidate).of({**VALUES, **values})
    return replace(found, candidate=candidate, measurement=replace(found.measurement, figures=figures))


@pytest.mark.parametrize(("probability", "drafted"), [(0.0, 3), (0.7, 1), (0.7, 4), (1.0, 5)])
def test_the_acceptance_follows_from_the_tokens_of_an_iteration(probability: float, drafted: int) -> None:
    tokens = 1.0 + sum(probability**each for each in range(1, drafted + 1))
    assert acceptance(tokens, drafted) == pytest.approx(probability, abs=1e-6)


def test_iterations_without_drafts_count() -> None:
    found = measured(1.5)
    assert found.measurement is not None
    figures = {**found.measurement.figures, "acceptance_rate": 0.9}
    often = replace(found, measurement=replace(found.measurement, figures=figures))
    assert with_measured_acceptance(serving("vllm"), [often]) == with_measured_acceptance(serving("vllm"), [found])
    reported = replace(found, measurement=replace(found.measurement, figures={"tokens_per_iteration": 1.5}))
    assert with_measured_acceptance(serving("vllm"), [reported]) == with_measured_acceptance(serving("vllm"), [found])


def test_the_median_of_trials_replaces_the_value_of_the_spec() -> None:
    task = serving("vllm")
    assert with_measured_acceptance(task, [measured(None), measured(1.5, speculative_tokens=None)]) == task
    learned = with_measured_acceptance(task, [measured(1.1), measured(1.8, speculative_tokens=1), measured(4.0)])
    assert [load.acceptance for load in learned.spec.serve.loads] == [pytest.approx(0.8)]


def test_predictions_of_other_candidates_with_speculation_change() -> None:
    space = {"speculation": [None, "ngram"], "speculative_tokens": [2, 3], "max_num_seqs": [64]}
    task = serving("vllm", devices=1, space=space)
    platform, found = tasks.platform(task), space_of(ENGINE, task)
    legal = legality(platform)
    predictions = predict(platform, found)
    pruned, first = prune(found, predictions, ()), found.candidate(0)
    problem = Problem(
        platform=platform, legality=legal, space=found, predictions=predictions, pruned=pruned, baseline=first
    )
    learned = with_learned(problem, [measured(3.5)])
    drafts = problem.space.columns(np.arange(len(found)))["speculation"] > 0
    before, after = problem.predictions.step_time_s, learned.predictions.step_time_s
    assert (after[drafts] < 0.8 * before[drafts]).all()
    assert (after[~drafts] == before[~drafts]).all()
    assert with_learned(learned, [measured(3.5)]) is learned
