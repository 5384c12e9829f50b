"""Legality: the devices of both roles, and what their layouts divide."""

from __future__ import annotations

import math

import numpy as np
from flagcore_models.layers import attention_counts
from flagcore_training.adapters import absent_targets
from flagcore_training.knobs import RuleTable

from flagcore.domain.space import BoolArray, Columns, IntArray, KnobValue, Rule
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore_rl.job import RlSpec, job_of
from flagcore_rl.roles import DEVICES, ROLLOUT, SHARD, STALENESS, THREADS, engine_of, serve_values, train_values

TP, CP, PP, EP = (f"{name}_parallel_size" for name in ("tensor_model", "context", "pipeline_model", "expert_model"))
MBS = "micro_batch_size"
RTP, RPP, RDP, REP = (f"{ROLLOUT}{name}_parallel_size" for name in ("tensor", "pipeline", "data", "expert"))
ETP, FIRST, LAST = (
    "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
ENDS = (FIRST, LAST, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""What lets stages have different numbers of layers."""
NAMES = {"CP": CP, "EP": EP, "PP": PP, "TP": TP, "RTP": RTP, "RPP": RPP, "RDP": RDP, "REP": REP, "SHARD": SHARD}
NAMES |= {"DEVICES": DEVICES, "STALENESS": STALENESS, "THREADS": THREADS, "micro_batch_size": MBS}
rule = RuleTable(__package__, NAMES)


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

    def whole_micro_batches(columns: Columns) -> BoolArray:
        ranks = np.maximum(replicas(columns) // size(columns, THREADS), 1)
        return np.asarray(work.optimizer_samples % (columns[MBS] * ranks) != 0)

    def instances(columns: Columns) -> BoolArray:
        own = np.where(columns[DEVICES] > 0, columns[DEVICES], devices)
        return np.asarray(own % (size(columns, RTP) * size(columns, RPP) * size(columns, RDP)) != 0)

    return (
        rule("both_roles", lambda c: trainers(c) < 1),
        rule("stale_apart", lambda c: (c[STALENESS] > 0) & (c[DEVICES] == 0)),
        rule("trainer_layout", lambda c: trainers(c) % (size(c, TP) * size(c, CP) * size(c, PP)) != 0),
        rule("whole_heads", lambda c: (heads % size(c, TP) != 0) | (heads % size(c, RTP) != 0)),
        rule("even_stages", uneven),
        rule("expert_groups", experts),
        rule("whole_mini_batch", lambda c: work.optimizer_samples % replicas(c) != 0),
        *(() if work.packing else (rule("whole_micro_batches", whole_micro_batches, samples=work.optimizer_samples),)),
        rule("shards", lambda c: replicas(c) % size(c, SHARD) != 0),
        rule("instances", instances),
        rule("rollout_experts", lambda c: (c[REP] > 1) & (c[REP] != size(c, RTP) * size(c, RDP))),
    )
