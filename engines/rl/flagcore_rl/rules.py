"""Legality: the devices of both roles, and what their layouts divide."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from flagcore_models.layers import attention_counts
from flagcore_training.adapters import absent_targets

from flagcore.domain.space import BoolArray, Columns, IntArray, KnobValue, Rule
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.i18n import N_
from flagcore_rl.job import RlSpec, job_of
from flagcore_rl.roles import DEVICES, ROLLOUT, SHARD, STALENESS, engine_of, serve_values, train_values

TP, CP, PP, EP = (f"{name}_parallel_size" for name in ("tensor_model", "context", "pipeline_model", "expert_model"))
RTP, RPP, RDP, REP = (f"{ROLLOUT}{name}_parallel_size" for name in ("tensor", "pipeline", "data", "expert"))
ETP, FIRST, LAST = (
    "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
ENDS = (FIRST, LAST, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""What lets stages have different numbers of layers."""


def check_settings(work: RlSpec) -> None:
    """Raise SpecError for a setting of a role that candidates set."""
    trainer, rollout = (
        engine_of(work.trainer.engine, "rl.trainer.engine"),
        engine_of(work.rollout.engine, "rl.rollout.engine"),
    )
    sizes: dict[str, KnobValue] = {**dict.fromkeys((TP, PP, CP, EP, SHARD), 1), "activation_checkpointing": "full"}
    trained, served = train_values(trainer, sizes, 1, 1), serve_values(rollout, {}, 1, 0.5)
    flags = {flag.name: knob.name for knob in rollout.knobs for flag in knob.flags}
    given = {f"rl.trainer.settings.{name}": (name in trained, value) for name, value in work.trainer.settings.items()}
    for name, value in work.rollout.engine_args.items():
        knob = flags.get(name.lstrip("-").replace("_", "-"), name)
        given[f"rl.rollout.engine_args.{name}"] = (knob in served, value)
    for key, (is_set, value) in given.items():
        if is_set:
            fix = "remove it, and list the knob in auto_tuner.space or auto_tuner.baseline"
            raise SpecError(key=key, value=value, problem="is what candidates set", fix=fix)


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules that all frameworks share.

    Raises SpecError for several kinds of chips, and for settings that candidates set.
    """
    if len(task.cluster.groups) > 1:
        problem, fix = (
            "are several kinds of chips, which are not predicted",
            "give the chips of one group as cluster.chip",
        )
        raise SpecError(key="cluster.groups", value=task.cluster.chips, problem=problem, fix=fix)
    check_settings(job_of(task))
    work, model, devices = job_of(task), task.spec.model, task.cluster.devices
    heads = math.gcd(*(each.heads for each in attention_counts(model)))
    absent_targets(model, work.trainer.adapter, "rl.trainer")

    def size(columns: Columns, name: str) -> IntArray:
        return np.asarray(np.maximum(columns.get(name, np.int64(1)), 1))  # records have more knobs than the space

    def trainers(columns: Columns) -> IntArray:
        return devices - np.minimum(columns[DEVICES], devices)

    def replicas(columns: Columns) -> IntArray:
        return np.maximum(trainers(columns) // (size(columns, TP) * size(columns, CP) * size(columns, PP)), 1)

    def uneven(columns: Columns) -> BoolArray:
        own = np.add(columns.get(FIRST, 0), columns.get(LAST, 0)) + len({*ENDS} & {*work.trainer.settings}) > 0
        return np.asarray((model.num_layers % size(columns, PP) != 0) & ~own)

    def experts(columns: Columns) -> BoolArray:
        ranks, expert = trainers(columns) // size(columns, PP), size(columns, EP) * size(columns, ETP)
        if work.trainer.engine == "fsdp2":  # experts on the ranks that share weights
            ranks = ranks // size(columns, TP)
        return np.asarray((columns[EP] > 1) & (((model.experts or 1) % size(columns, EP) != 0) | (ranks % expert != 0)))

    def instances(columns: Columns) -> BoolArray:
        own = np.where(columns[DEVICES] > 0, columns[DEVICES], devices)
        return np.asarray(own % (size(columns, RTP) * size(columns, RPP) * size(columns, RDP)) != 0)

    def rule(name: str, knobs: tuple[str, ...], message: str, broken: Callable[[Columns], BoolArray]) -> Rule:
        return Rule(name=name, knobs=knobs, message=message, broken=broken)

    layout = (DEVICES, TP, CP, PP)
    return (
        rule(
            "both_roles",
            (DEVICES,),
            N_("rollout_devices must leave devices for the trainer"),
            lambda c: trainers(c) < 1,
        ),
        rule(
            "stale_apart",
            (STALENESS, DEVICES),
            N_("staleness needs rollout_devices: on the same devices, generation and training cannot overlap"),
            lambda c: (c[STALENESS] > 0) & (c[DEVICES] == 0),
        ),
        rule(
            "trainer_layout",
            layout,
            N_("TP x CP x PP must divide the devices of the trainer"),
            lambda c: trainers(c) % (size(c, TP) * size(c, CP) * size(c, PP)) != 0,
        ),
        rule(
            "whole_heads",
            (TP, RTP),
            N_("TP and rollout TP must divide the attention heads"),
            lambda c: (heads % size(c, TP) != 0) | (heads % size(c, RTP) != 0),
        ),
        rule("even_stages", (PP,), N_("PP must divide the layers, unless the ends have numbers of their own"), uneven),
        rule(
            "expert_groups", (DEVICES, TP, PP, EP), N_("EP must divide the experts, and the ranks of a stage"), experts
        ),
        rule(
            "whole_mini_batch",
            layout,
            N_("the replicas of the trainer must divide the samples of an optimizer step"),
            lambda c: work.optimizer_samples % replicas(c) != 0,
        ),
        rule(
            "shards",
            (*layout, SHARD),
            N_("data_parallel_shard_size must divide the replicas of the trainer"),
            lambda c: replicas(c) % size(c, SHARD) != 0,
        ),
        rule(
            "instances",
            (DEVICES, RTP, RPP, RDP),
            N_("an instance's devices must divide those of the rollout"),
            instances,
        ),
        rule(
            "rollout_experts",
            (RTP, RDP, REP),
            N_("rollout EP must be 1, or all devices of an instance's stage"),
            lambda c: (c[REP] > 1) & (c[REP] != size(c, RTP) * size(c, RDP)),
        ),
    )
