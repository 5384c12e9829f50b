"""Pruning rules: candidates that are not worth a trial."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flagcore.contracts import PruningRule
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Space
from flagcore.domain.spec import Task
from flagcore.plugins import workload
from flagcore.stages.build import build
from flagcore.stages.discover import costs as costs_of
from flagcore.stages.predict import predict
from flagcore.stages.prune import prune
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject


def pruning_rules_are_valid(plugin: Subject) -> Iterator[Problem]:
    plugin.implements("flagcore_pruning_rules")
    for task in plugin.tasks():
        plugin.loaded.pruning_rules(task)
    yield from plugin.problems_of("flagcore_pruning_rules")


def pruning_rules_have_messages(plugin: Subject) -> Iterator[Problem]:
    for _, rules in _ruled(plugin):
        for rule in rules:
            if not rule.name.isidentifier() or not rule.message.strip():
                yield Problem(
                    f"flagcore_pruning_rules: the rule {rule.name!r} has the message {rule.message!r}",
                    "give it a name of letters and underscores, and a sentence for `flag explain`",
                )


def pruning_rules_leave_candidates(plugin: Subject) -> Iterator[Problem]:
    for task, rules in _ruled(plugin):
        space, predictions = _space(plugin, task)
        for rule in rules:
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


def pruning_rules_judge_single_candidates(plugin: Subject) -> Iterator[Problem]:
    for task, rules in _ruled(plugin):
        space, predictions = _space(plugin, task)
        rows = np.linspace(0, len(space) - 1, min(len(space), 200)).astype(np.int64)
        for rule in rules:
            try:
                whole, *pieces = (
                    np.asarray(rule.prunes(space.columns(some), predictions.take(some)))
                    for some in (rows, rows[:50], rows[50:51], rows[51:])
                )
                same = np.array_equal(whole, np.concatenate(pieces))
            except Exception:
                continue  # another check reports it
            if not same:
                yield Problem(
                    f"flagcore_pruning_rules: {rule.name} depends on the other candidates",
                    "judge each row by itself: no mean, no minimum, no sorting",
                )


def _ruled(plugin: Subject) -> list[tuple[Task, tuple[PruningRule, ...]]]:
    plugin.implements("flagcore_pruning_rules")
    found = [(task, rules) for task in plugin.tasks() if (rules := plugin.loaded.pruning_rules(task))]
    if not found:
        raise Skip("the plugin has no pruning rules for a small task on 8 of its chips")
    return found


def _space(plugin: Subject, task: Task) -> tuple[Space, Predictions]:
    key = f"space of {task.cluster.chips}"
    if key not in plugin.memory:
        engine = workload("megatron")
        space = build(engine.axes(task), engine.rules(task), engine.merges(task))
        plugin.memory[key] = space, predict(task, engine, space, costs_of(task.cluster, plugin.loaded, "megatron"))
    found: tuple[Space, Predictions] = plugin.memory[key]
    return found
