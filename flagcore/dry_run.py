"""A tune without trials: the plan from predictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flagcore.domain.plan import Plan, summarize
from flagcore.domain.trial import ESTIMATE, Role, Trial, TrialState
from flagcore.errors import NoDevice
from flagcore.i18n import N_, _
from flagcore.problem import Problem, rows_by_time
from flagcore.stages.learn import learn
from flagcore.stages.missing_costs import no_time
from flagcore.stages.predict import record


def require_predicted_time(problem: Problem) -> None:
    """Raise NoDevice unless some candidate has a predicted time. Probes need it, too: they do not run communication."""
    if not np.isfinite(problem.predictions.step_time_s[problem.pruned.open_rows]).any():
        reason = no_time(problem.platform.task, problem.platform.costs)
        raise NoDevice(_("no time can be predicted: {why}", why=reason))


def dry_run(problem: Problem) -> Plan:
    """Return a plan from predictions: the baseline and the `max_trials` fastest candidates."""
    task, row = problem.platform.task, problem.space.find(problem.baseline)
    assert row is not None, "the baseline is in the space"
    order = [int(each) for each in rows_by_time(problem)]
    rows = dict.fromkeys([row, *order[: task.spec.control.max_trials]])
    trials = [
        Trial(
            number=number,
            candidate=problem.space.candidate(each),
            role=Role.SEARCH if number else Role.BASELINE,
            state=TrialState.PREDICTED,
            predicted=record(task, problem.predictions.row(each)),
            fidelity=ESTIMATE,
        )
        for number, each in enumerate(rows)
    ]
    best, base = (problem.predictions.row(each) for each in (order[0], row))
    gains: tuple[float, ...] = ()
    if best.step_time_s and base.step_time_s and base.fits is not False:
        gains = (base.step_time_s / best.step_time_s - 1.0,)
    stopped_because = N_("fidelity = estimate runs no trials")
    plan = summarize(task, problem.space, problem.pruned, learn((), ESTIMATE), stopped_because, problem.knobs)
    return replace(
        plan,
        trials=tuple(trials),
        baseline=trials[0],
        best=trials[list(rows).index(order[0])],
        gains=gains,
    )
