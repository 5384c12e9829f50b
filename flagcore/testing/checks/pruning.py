"""Pruning rules: candidates that are not worth a trial."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import PruningRule
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Space
from flagcore.plugins import workload
from flagcore.stages.build import build
from flagcore.stages.discover import costs as costs_of
from flagcore.stages.predict import predict
from flagcore.stages.prune import prune
from flagcore.testing.kit import Problems, check
from flagcore.testing.subject import Problem, Skip, Subject

Ruled = tuple[PruningRule, Space, Predictions]


def _rules(plugin: Subject) -> list[Ruled]:
    """Return each rule with the candidates of the task that it is for."""
    plugin.implements("flagcore_pruning_rules")
    return plugin.once("pruning rules", lambda: _ruled(plugin))


def _ruled(plugin: Subject) -> list[Ruled]:
    found: list[Ruled] = []
    engine = workload("megatron")
    for task in plugin.tasks():
        if rules := plugin.loaded.pruning_rules(task):
            space = build(engine.axes(task), engine.rules(task), engine.merges(task))
            predictions = predict(task, engine, space, costs_of(task.cluster, plugin.loaded, "megatron"))
            found += [(rule, space, predictions) for rule in rules]
    if not found:
        raise Skip("the plugin has no pruning rules for a small task on 8 of its chips")
    return found


@check("give it a name of letters and underscores, and a sentence for `flag explain`", each=_rules)
def pruning_rules_have_messages(rule: PruningRule, space: Space, predictions: Predictions) -> Problems:
    if not rule.name.isidentifier() or not rule.message.strip():
        yield f"flagcore_pruning_rules: the rule {rule.name!r} has the message {rule.message!r}"


@check(each=_rules)
def pruning_rules_leave_candidates(rule: PruningRule, space: Space, predictions: Predictions) -> Problems:
    pruned = prune(space, predictions, workload("megatron"), (rule,), ())
    if pruned.broken_rules:
        yield Problem(
            f"flagcore_pruning_rules: {'; '.join(map(str, pruned.broken_rules))}",
            "return an array of booleans, one a candidate, computed from the columns of knobs",
        )
    elif not pruned.open_rows.size:
        yield Problem(
            f"flagcore_pruning_rules: {rule.name} leaves no candidate of a small model on 8 devices",
            "prune only candidates that are worse than a remaining one",
        )


@check("judge each row by itself: no mean, no minimum, no sorting", each=_rules)
def pruning_rules_judge_single_candidates(rule: PruningRule, space: Space, predictions: Predictions) -> Problems:
    rows = np.linspace(0, len(space) - 1, min(len(space), 200)).astype(np.int64)
    try:
        whole, *pieces = (
            np.asarray(rule.prunes(space.columns(some), predictions.take(some)))
            for some in (rows, rows[:50], rows[50:51], rows[51:])
        )
        same = np.array_equal(whole, np.concatenate(pieces))
    except Exception:
        return  # another check reports it
    if not same:
        yield f"flagcore_pruning_rules: {rule.name} depends on the other candidates"
