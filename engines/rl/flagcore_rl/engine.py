"""Frameworks of reinforcement learning as engines of the core. They differ in a row of `frameworks.yaml`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from flagcore_importers.programs import unknown_release
from flagcore_serving.advice import spec_warnings
from flagcore_serving.engine import ServingEngine
from flagcore_training.knobs import divisors, read_knobs
from flagcore_vendorkit.settings import UNKNOWN_TIME

from flagcore.contracts import Costs, Published, differs_only
from flagcore.domain.engine import UNKNOWN, Unmodelled
from flagcore.domain.knob import Knob
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, KnobValue, Rule
from flagcore.domain.spec import AUTO, Task
from flagcore.i18n import _
from flagcore.spec.plain_data import package_yaml
from flagcore_rl.job import job_of
from flagcore_rl.predict import Framework, predict
from flagcore_rl.roles import DEVICES, STALENESS, engine_of, keys_of, serve_task, train_task
from flagcore_rl.rules import EP, PP, RTP, TP, rules
from flagcore_rl.trials import RlCommands, UserCommand


def _rollout_devices(task: Task) -> tuple[KnobValue, ...]:
    """Return `None` and numbers of devices with which both roles have whole nodes, or powers of 2 within a node."""
    devices, node = task.cluster.devices, task.cluster.groups[0].devices_per_node
    unit = node if devices > node else 1
    parts = {devices * share // 8 // unit * unit for share in (1, 2, 3, 4, 5, 6)}
    return (None, *sorted(parts - {0, devices}))


def _staleness(task: Task) -> tuple[KnobValue, ...]:
    return tuple(dict.fromkeys((0, job_of(task).staleness)))


def _tensor(task: Task) -> tuple[KnobValue, ...]:
    return tuple(size for size in divisors(task.cluster.devices) if size <= task.cluster.linked_devices)


def _tokens(task: Task) -> tuple[KnobValue, ...]:
    work = job_of(task)
    return tuple(times * work.longest for times in (1, 2, 4)) if work.packing else (None,)


def _samples(task: Task) -> tuple[KnobValue, ...]:
    return (1,) if job_of(task).packing else (1, 2, 4, 8)


AUTOS: Mapping[str, Callable[[Task], Sequence[KnobValue]]] = {
    DEVICES: _rollout_devices,
    STALENESS: _staleness,
    "rollout_tensor_parallel_size": _tensor,
    "micro_batch_tokens": _tokens,
    "micro_batch_size": _samples,
}
KNOBS = tuple(
    replace(knob, auto=AUTOS.get(knob.name, knob.auto)) for knob in read_knobs(__package__, scope=["space"], flag="")
)
BY_NAME = {knob.name: knob for knob in KNOBS}
RECOMPUTE = "activation_checkpointing"
MORE_MEMORY = {RECOMPUTE: -1} | {knob.name: knob.memory_order for knob in KNOBS if knob.memory_order}
"""The knobs whose larger values need more memory, or less for -1."""


class RlEngine(UserCommand):
    """A framework of reinforcement learning."""

    kind = "rl"
    knobs: tuple[Knob, ...] = KNOBS

    def __init__(self, name: str) -> None:
        self.name = name
        rows = package_yaml(__package__, "frameworks.yaml")
        self.framework = Framework(**{**next(iter(rows.values())), **rows[name]})
        self.distribution = self.framework.distribution
        self.commands = RlCommands(name, self.knobs)

    def axes(self, task: Task) -> tuple[Axis, ...]:
        fixed = self.fixed(task)
        return tuple(
            knob.axis(fixed.get(knob.name) or task.listed_values(knob, AUTO)) for knob in self.knobs if knob.searchable
        )

    def rules(self, task: Task) -> tuple[Rule, ...]:
        return (*rules(task), *super().rules(task))

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        return differs_only(self.knobs, columns, candidate, MORE_MEMORY)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which of `columns` differ from `candidate` only by more recompute."""
        return differs_only(self.knobs, columns, candidate, {RECOMPUTE: 1})

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return colocated, on-policy layouts with full recompute and micro-batches of the longest sample."""
        neutral: dict[str, str | tuple[KnobValue, ...]] = {knob.name: (knob.neutral,) for knob in self.knobs}
        longest = (job_of(task).longest if job_of(task).packing else None,)
        layout = dict.fromkeys((RTP, TP, PP, EP), AUTO)
        return {**neutral, **layout, RECOMPUTE: ("full",), "micro_batch_tokens": longest}

    def rule_of_thumb(self, task: Task, columns: Columns, predictions: Predictions) -> int:
        """Return the row with the smallest TP x PP of the trainer that fits, then PP and EP, then TP of the rollout."""
        missing_bytes = np.where(predictions.fits, 0.0, predictions.device_used_bytes)
        size = columns[TP] * columns[PP]
        return int(np.lexsort((columns[RTP], columns[EP], columns[PP], size, missing_bytes))[0])

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, np.ndarray]:
        return {
            knob.name: np.array([knob.axis(()).encode(values.get(knob.name, knob.neutral))], dtype=np.int64)
            for knob in self.knobs
        }

    def warnings(self, task: Task) -> Sequence[str]:
        """Return warnings of unknown releases, and of staleness and lengths that do not mean what they say."""
        work = job_of(task)
        lines = unknown_release("rl.engine_version", self.name, work.engine_version, self.framework.releases)
        role, rollout = serve_task(task, task.cluster.devices), engine_of(work.rollout.engine, "rl.rollout.engine")
        own = spec_warnings(role.spec, rollout.program) if isinstance(rollout, ServingEngine) else ()
        lines += [each.replace("serve.", "rl.rollout.") for each in own if each.startswith("serve.engine_version")]
        if work.staleness > 1:
            steps = work.staleness
            lines.append(_("rl.staleness = {steps} is predicted as 1: as much overlaps with more", steps=steps))
        if work.context and work.longest > work.context:
            text = _(
                "the longest prompt and answer have {longest} tokens, more than the model's context of {context}: "
                "the rollout ends such answers before; shorten rl.answer_len, unless your command extends the context",
                longest=work.longest,
                context=work.context,
            )
            lines.append(text)
        return lines

    def unmodelled(self, task: Task) -> Sequence[Unmodelled]:
        """Return the settings of both roles that their engines do not predict."""
        work, devices = job_of(task), task.cluster.devices
        settings = {knob.name for knob in engine_of(work.trainer.engine, "rl.trainer.engine").knobs}
        unknown = [
            Unmodelled(name=f"rl.trainer.settings.{name}", why=UNKNOWN, time=UNKNOWN_TIME)
            for name in work.trainer.settings
            if name not in settings
        ]
        roles = {
            "rl.trainer.": train_task(task, devices, work.longest, work.optimizer_samples),
            "rl.rollout.": serve_task(task, devices),
        }
        for prefix, role in roles.items():
            engine = engine_of(role.spec.work.engine, f"{prefix}engine")
            with keys_of(prefix):
                found = engine.unmodelled(role)
            unknown += [replace(each, name=re.sub(r"\b(train|serve)\.", prefix, each.name)) for each in found]
        return unknown

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        axes = {knob.name: knob.axis(()) for knob in self.knobs}
        return predict(task, columns, costs, self.framework, lambda name, code: axes[name].decode(code))

    def published(self, task: Task, values: Mapping[str, KnobValue], notes: str) -> Published:
        return Published(task, dict(values))


NEMO_RL, OPENRLHF, SLIME, TRL, VERL = (RlEngine(name) for name in ("nemo-rl", "openrlhf", "slime", "trl", "verl"))
