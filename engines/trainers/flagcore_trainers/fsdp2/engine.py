"""The engine `fsdp2`: predictions of programs on torch's `fully_shard`, described by the model's shapes.

Also its knobs, and its rules for legal candidates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from flagcore_importers.programs import unknown_release
from flagcore_models.layers import mixer_counts, parameters, product_counts
from flagcore_models.mixers.attention import Attention
from flagcore_training.adapters import absent_targets, as_noted
from flagcore_training.frameworks import framework_of, kept_framework, of_replicas, reading
from flagcore_training.knobs import RuleTable, read_knobs
from flagcore_training.lengths import cut_warnings, length_warnings
from flagcore_training.real_job import launch

from flagcore.contracts import Commands, Costs, Engine, Platform, Published
from flagcore.domain.engine import Unmodelled
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Launch, Start
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.domain.trial import Measurement
from flagcore.errors import LaunchError, SpecError
from flagcore.i18n import N_, _
from flagcore_trainers import fully_shard as fs
from flagcore_trainers.framework import fixed, fp32_products, loss_warnings
from flagcore_trainers.fully_shard import (
    AC,
    COMPILE,
    CP,
    DUALPIPEV,
    EP,
    INTERLEAVED,
    MBS,
    OFFLOAD,
    PP,
    REDUCE,
    REPLICATE,
    RESHARD,
    SCHEDULE,
    SCHEDULES,
    SELECTIVE,
    SHARD,
    STATES,
    TP,
    ZBV,
    is_plain,
    missing_parts,
    parts,
)
from flagcore_trainers.fully_shard import predict as prediction
from flagcore_trainers.fully_shard.memory import of_rank
from flagcore_trainers.fully_shard.traffic import FRAMEWORK, RECIPE, TRIAL, with_fused_layers
from flagcore_trainers.importing import Imported
from flagcore_trainers.meaning import WholeModel, on_one_device
from flagcore_trainers.recipes import on_fsdp, spec_of

KNOBS = read_knobs(__package__, scope=["space"], flag="")
PIPELINE_LAYERS = "pipeline_layers"
"""The rule that all stages have as many layers."""
ADAPTERS_ALONE = "adapters_alone"
"""The rule that adapters are not divided, unless a spec lists it."""
OF_ADAPTERS: Mapping[str, Sequence[KnobValue]] = {TP: (1,), PP: (1,), AC: ("none", "full")}
"""The values of a space with adapters, unless a spec lists others."""

NAMES = {"CP": CP, "EP": EP, "PP": PP, "TP": TP, "REPLICATE": REPLICATE, "SHARD": SHARD, "MBS": MBS, "AC": AC}
NAMES |= {"COMPILE": COMPILE, "OFFLOAD": OFFLOAD, "REDUCE": REDUCE, "RESHARD": RESHARD, "STATES": STATES}
NAMES |= {"SCHEDULE": SCHEDULE}
"""The names of knobs in `rules.yaml`, by their fields."""
rule = RuleTable(__package__, NAMES)


LOSS_PARTS = "loss_parts"
_LOSS_CHUNKS = re.compile(r"(?<![\w.-])([1-9]\d{0,3}) loss chunks\b")
"""Notes on the parts of the tokens of which the head and the loss run one after another (`Program.loss_parts`)."""


def check_model(task: Task) -> None:
    """Raise SpecError if the model has parts that predictions do not have."""
    if missing := missing_parts(task.spec.model):
        fix = "use engine: megatron, or your own program with engine: command"
        problem = f"has parts that the engine fsdp2 does not support: {', '.join(missing)}"
        raise SpecError(key="model", value=task.spec.model.name, problem=problem, fix=fix)


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the legality rules. Raises SpecError for a model that the engine does not support."""
    check_model(task)
    devices, train, model = task.cluster.devices, task.spec.train, task.spec.model
    count, batch, length, precision = model.experts, train.global_batch_size, train.seq_length, train.precision
    divided = (each for each in product_counts(model) if each.split == "outputs")
    sizes = {model.vocab_size, *(mixer.heads for mixer in mixer_counts(model))}
    sizes |= {output.units or output.width for each in divided for output in each.layers}
    shared = math.gcd(*sizes)
    # programs seldom divide adapters
    divided_adapters = rule(ADAPTERS_ALONE, lambda c: (c[TP] > 1) | (c[PP] > 1) | (c[AC] == SELECTIVE))
    return (
        rule("world_size", lambda c: c[REPLICATE] * c[SHARD] * c[TP] * c[CP] * c[PP] != devices, devices=devices),
        rule("global_batch_size", lambda c: batch % (c[MBS] * c[REPLICATE] * c[SHARD]) != 0, batch=batch),
        rule("tensor_parallel", lambda c: shared % c[TP] != 0, shared=shared),
        rule(
            "sequence_length",
            lambda c: (length % (c[TP] * c[CP]) != 0) | ((c[CP] > 1) & (length % (2 * c[CP]) != 0)),
            length=length,
        ),
        rule("sharded_replicas", lambda c: (c[REPLICATE] > 1) & (c[SHARD] * c[CP] == 1)),
        rule("all_in_fp32", lambda c: ((c[REDUCE] == 2) | (c[STATES] == 2)) & (precision == "fp32")),
        *_pipeline_rules(task),
        *([divided_adapters] if train.adapter and not lists_others(task.spec) else ()),
        *(_expert_rules(count) if count else ()),
        *(() if is_plain(model) else (_layer_rule(task),)),
    )


def lists_others(spec: Spec) -> bool:
    """Return whether a spec with adapters has or lists a value of a knob that `OF_ADAPTERS` does not have."""
    given = {name: values for name, values in spec.space.items() if not isinstance(values, str)}
    return any(
        value not in usual
        for name, usual in OF_ADAPTERS.items()
        for value in (*given.get(name, ()), (spec.baseline or {}).get(name, usual[0]))
    )


def _uneven(task: Task, stages: int) -> list[str]:
    layers = task.spec.model.num_layers
    return [f"{layers} layers do not divide over {stages} stages: predicted as if they did"] * (layers % stages > 0)


def _layer_rule(task: Task) -> Rule:
    """Return the rule of layers other than attention over all tokens, whose division is not predicted.

    Heads with windows are divided by tensor parallelism.
    """
    divides = all(type(each) is Attention and not each.gate for each in mixer_counts(task.spec.model))
    tensor = "" if divides else f"{TP} = 1, "
    return rule(
        "layers_alone",
        lambda c: (
            ((c[TP] > 1) & (not divides)) | (c[CP] > 1) | (c[AC] == SELECTIVE) | ((c[PP] > 1) & (c[SCHEDULE] >= ZBV))
        ),
        tensor=tensor,
    )


def _expert_rules(count: int) -> tuple[Rule, ...]:
    """Return the rules of experts."""
    return (
        rule("expert_parallel", lambda c: (count % c[EP] != 0) | (c[SHARD] * c[CP] % c[EP] != 0), count=count),
        rule("experts_alone", lambda c: (c[TP] > 1) | ((c[PP] > 1) & (c[SCHEDULE] >= ZBV))),
    )


def _pipeline_rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of pipelines. Source: torch 2.13 `distributed/pipelining/schedules.py`."""
    model, batch = task.spec.model, task.spec.train.global_batch_size

    def microbatches_broken(c: Columns) -> BoolArray:
        count, name = batch // np.maximum(c[MBS] * c[REPLICATE] * c[SHARD], 1), c[SCHEDULE]
        short = count < c[PP] * np.where(name == DUALPIPEV, 2, 1)
        uneven = (name == INTERLEAVED) & (count % np.maximum(count // c[PP], 1) != 0)
        return np.asarray((c[PP] > 1) & (short | uneven))

    return (
        rule(
            PIPELINE_LAYERS,
            lambda c: (c[PP] > 1) & (model.num_layers % (c[PP] * parts(c)) != 0),
            num_layers=model.num_layers,
            schedule=SCHEDULES[0],
        ),
        rule("pipeline_microbatches", microbatches_broken),
        rule("pipeline_weights", lambda c: (c[PP] > 1) & ((c[RESHARD] > 0) | (c[OFFLOAD] > 0))),
        rule("pipeline_head", lambda c: (c[PP] > 1) & (not model.untie_embeddings_and_output_weights)),
        rule(
            "split_backward",
            lambda c: (c[PP] > 1) & (c[SCHEDULE] >= ZBV) & ((c[COMPILE] > 0) | (c[AC] >= SELECTIVE)),
            words=" and ".join(SCHEDULES[2:]),
        ),
    )


def merges(task: Task) -> tuple[Merge, ...]:
    """Return the merges: one rank always has all weights, and without a pipeline there is no schedule."""

    def reshard(columns: Columns) -> Columns:
        alone = (columns[SHARD] * columns[CP] == 1) & (columns[PP] == 1)
        return {RESHARD: np.where(alone, 1, columns[RESHARD])}

    return (
        Merge(name="reshard_of_one", knobs=(SHARD, CP, PP, RESHARD), canonical=reshard),
        Merge(
            name="no_pipeline",
            knobs=(PP, SCHEDULE),
            canonical=lambda columns: {SCHEDULE: np.where(columns[PP] == 1, 1, columns[SCHEDULE])},
        ),
    )


RELEASES = ">=2.8"
"""The releases of torch whose memory and time are predicted, as a PEP 440 specifier."""
NO_PROGRAM = "predicts programs on torch's fully_shard, and has none that could be started"
OWN_PROGRAM = "use `flag estimate`, or run your program: set engine: command, or torchtitan, and train.command"


class FrameworkCommands(Commands):
    """Reads commands of fine-tuning frameworks, also for other engines that they run on."""

    def role(self, command: Sequence[str], directory: str) -> str | None:
        return None if framework_of(command) is None else ""

    def read(self, start: Start, directory: Path, model: str | None) -> Imported:
        return spec_of(start, directory, model)


class OnlyPlans(WholeModel):
    """Plans without trials."""

    def only(self, spec: Spec) -> bool:
        return True


class Fsdp2(Engine):
    """Training with FSDP2 in any program, which is predicted and not run.

    The real job is only that of a framework's command.
    """

    name = "fsdp2"
    kind = "train"
    knobs: tuple[Knob, ...] = KNOBS
    distribution = "torch"
    modules: Mapping[str, str] = {"torch": f"torch{RELEASES}"}
    plans = OnlyPlans()
    commands = FrameworkCommands()

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the axes of the space. Unless it lists others, a framework's command has only what it can set."""
        found = dict[str, Sequence[KnobValue]]()
        if kept_framework(task.spec):
            found |= fixed(reading(task.spec), self.knobs, self._own_values(task))
        found = {name: values for name, values in found.items() if task.spec.space.get(name, AUTO) == AUTO}
        knobs = [knob for knob in self.knobs if knob.searchable]
        return tuple(knob.axis(found.get(knob.name) or task.listed_values(knob, AUTO)) for knob in knobs)

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Encode one candidate. Without a number of replicas that share weights, devices without another part do."""
        if fs.SHARD not in values:
            sizes = (values.get(name) for name in (fs.REPLICATE, fs.TP, fs.CP, fs.PP))
            parts = math.prod(each for each in sizes if isinstance(each, int) and each > 0)
            values = {**values, fs.SHARD: max(task.cluster.devices // parts, 1)}
        return super().columns(task, values)

    def _own_values(self, task: Task) -> dict[str, KnobValue]:
        """Return the values of a framework's command, which a spec keeps for the real job."""
        values = {knob.name: knob.neutral for knob in self.knobs}
        if kept_framework(task.spec) is None:
            return values
        read = reading(task.spec)
        replicas = task.cluster.devices // math.prod(map(read.size, (fs.TP, fs.PP, fs.CP)))
        return {**values, **on_fsdp(read, max(replicas, 1))[1]}

    def unmodelled(self, task: Task) -> Sequence[Unmodelled]:
        return fp32_products(task)

    def merges(self, task: Task) -> tuple[Merge, ...]:
        return merges(task)

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        train, read = task.spec.train, reading(task.spec) if kept_framework(task.spec) else None
        waits = read is not None and not read.is_on("synchronizes")
        casts = read is not None and not read.is_on("fsdp") and train.precision != "fp32" and train.adapter is None
        program = RECIPE if fs.STATES in train.assumed else FRAMEWORK if waits else TRIAL
        parts = float(train.assumed.get(LOSS_PARTS) or program.loss_parts)
        early = read is None or read.is_on("fsdp")  # other checkpoints may be reentrant
        program = replace(program, loss_parts=parts, casts=casts, stops_early=early)
        if read is not None:
            program = replace(
                program,
                masked=program.masked and "balanced_context" not in read.row,
                narrow_loss=program.narrow_loss or read.is_on("narrow_loss"),
                neighbours=program.neighbours or read.is_on("balanced"),
                own_attention=program.own_attention or read.is_on("own_attention"),
            )
            if read.is_on("dispatched"):
                work = replace(train, assumed={fs.DISPATCHER: "flex", **train.assumed})
                task = replace(task, spec=replace(task.spec, work=work))
        program = with_fused_layers(program, task.spec)
        found = prediction.predict(task, columns, costs, program)
        sizes = (columns[each] for each in (REPLICATE, SHARD, TP, PP, CP))
        is_alone = (math.prod(sizes) == 1) & (columns[OFFLOAD] == 0) & (columns[AC] != SELECTIVE)
        if not is_alone.any() or of_replicas(task.spec) is None:
            return found
        layout = prediction.layout_of(task, columns)
        layout = replace(layout, uniform=(columns[AC] > SELECTIVE).astype(np.float64))
        return on_one_device(task, layout, found, costs, is_alone)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        self._check_command(task.spec)
        absent_targets(task.spec.model, task.spec.train.adapter)
        # frameworks give their stages a layer more or less
        left_out = PIPELINE_LAYERS if kept_framework(task.spec) else ""
        return tuple(each for each in rules(task) if each.name != left_out)

    def _check_command(self, spec: Spec) -> None:
        """Raise SpecError for a command, which nothing would run."""
        if (command := spec.train.command) is not None and kept_framework(spec) is None:
            fix = "remove it, or use engine: command for your own program"
            raise SpecError(key="train.command", value=list(command), problem="is not used by fsdp2", fix=fix)

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return what an expert would consider: weights shared by all replicas, sizes of TP and of micro-batches."""
        neutral: dict[str, str | tuple[KnobValue, ...]] = {knob.name: (knob.neutral,) for knob in self.knobs}
        return {**neutral, fs.SHARD: AUTO, fs.TP: AUTO, fs.MBS: AUTO, fs.AC: ("none", "full")}

    def rule_of_thumb(self, task: Task, columns: Columns, predictions: Predictions) -> int:
        """Return the row with the smallest TP that fits, then without checkpoints, then the largest micro-batch."""
        missing_bytes = np.where(predictions.fits, 0.0, predictions.device_used_bytes)
        return int(np.lexsort((-columns[fs.MBS], columns[fs.AC], columns[fs.TP], missing_bytes))[0])

    def warnings(self, task: Task) -> Sequence[str]:
        release = unknown_release("train.engine_version", "torch", task.spec.train.engine_version, RELEASES)
        of_job = [*_without_shards(task), *_without_depths(task), *_whole_gradients(task)]
        stages = int((task.spec.baseline or {}).get(fs.PP) or 1)
        uneven = _uneven(task, stages) if kept_framework(task.spec) else []
        return [*release, *of_job, *cut_warnings(task.spec.train), *loss_warnings(task), *uneven]

    # Job records

    def published(self, task: Task, values: Mapping[str, KnobValue], notes: str) -> Published:
        """Return the task and the knobs of a job record: all devices without another part share the weights, or have
        replicas if the record says how many share.

        Stages may differ by a layer, because the job did run. They are predicted as if all had the same. Ranks that
        share weights divide the experts, and send each token to a rank once, as in NeMo AutoModel's recipes
        (`examples/llm_benchmark` @36044ad3: ep_size, DeepEP or HybridEP), whose weights and optimizer states have 16
        bits (`from_config`: torch_dtype), and whose router is fake_balanced_gate. With `compile`, experts are divided
        only if the record says so, as in torchtitan. Recipes of runs that do not fit otherwise recompute all layers.
        """
        task, assumed_lengths = as_noted(task, notes)
        work = task.spec.train
        others = [int(values.get(name) or 1) for name in (fs.REPLICATE, fs.TP, fs.CP, fs.PP)]
        shard = int(values.get(fs.SHARD) or max(task.cluster.devices // math.prod(others), 1))
        replicas = max(task.cluster.devices // (shard * math.prod(others[1:])), 1)
        completed: dict[str, KnobValue] = {fs.REPLICATE: replicas, fs.SHARD: shard, fs.RESHARD: others[-1] == 1}
        count, is_recipe = task.spec.model.experts, False
        if count:
            is_narrow = work.precision != "fp32" and values.get(fs.STATES) != "fp32"
            is_recipe = is_narrow and not values.get(fs.COMPILE)
            completed[fs.EP] = math.gcd(count, shard * others[2]) if is_recipe else 1
            completed |= {fs.STATES: "bf16"} if is_recipe else {}
            work = replace(work, assumed={fs.DISPATCHER: "flex", **({fs.STATES: "bf16"} if is_recipe else {})})
        if parts := _LOSS_CHUNKS.search(notes):
            work = replace(work, assumed={**work.assumed, LOSS_PARTS: int(parts[1])})
        noted = {PIPELINE_LAYERS, ADAPTERS_ALONE, *assumed_lengths}
        noted |= {fs.STATES} & (completed.keys() - values.keys())
        task = replace(task, spec=replace(task.spec, work=work))
        values = {**completed, **values}
        limit = task.cluster.groups[0].chip.memory_bytes
        if fs.AC not in values and limit is not None:
            recipe = {"fused_norm": is_recipe, "compiled_loss": is_recipe}
            job = prediction.memory_job(task, self.columns(task, values), **recipe)
            if of_rank(job).peak[0] > limit.value:
                values[fs.AC] = "full"
                noted.add(fs.AC)
        return Published(task, values, frozenset(noted), self._assumed(task, values, noted))

    def _assumed(self, task: Task, values: Mapping[str, KnobValue], noted: Collection[str]) -> Sequence[str]:
        """Return a line for each key of a job record that has no effect or was filled in."""
        train = task.spec.train
        given = {"train.implementation": train.implementation, "train.attention": train.attention}
        unused = {name: value for name, value in given.items() if value not in (None, "flash")}
        lines = [*_without_depths(task), *length_warnings(train, noted)]
        lines += [f"{name} = {value} does nothing: fsdp2 has torch's own layers" for name, value in unused.items()]
        if fs.AC in noted:
            lines.append(f"{fs.AC} = {values[fs.AC]} is assumed: the run would not fit otherwise")
        if fs.STATES in noted:
            lines.append(f"{fs.STATES} = {values[fs.STATES]} is assumed, as in recipes of NeMo AutoModel")
            if train.adapter is None and train.lengths is None:
                lines.append("tokens are routed to neighbouring experts, as in its benchmarks: others take longer")
        return [*lines, *_uneven(task, int(values.get(fs.PP) or 1))]

    # Trials, which it does not have

    def ready(self, spec: Spec) -> None:
        self._check_command(spec)
        raise SpecError(key="train.engine", value=self.name, problem=NO_PROGRAM, fix=OWN_PROGRAM)

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        spec, values = platform.task.spec, candidate.as_dict()
        if not for_real or kept_framework(spec) is None:
            raise LaunchError(f"train.engine = fsdp2 {NO_PROGRAM}; {OWN_PROGRAM}")
        for line in _without_shards(platform.task):
            raise LaunchError(line)
        micro, replicas = int(values[fs.MBS] or 1), int(values[fs.REPLICATE] or 1) * int(values[fs.SHARD] or 1)
        given = {name: value for name, value in values.items() if name != fs.MBS}
        steps = spec.train.global_batch_size // (micro * replicas)
        own = self._own_values(platform.task)
        return launch(spec, folder, given=given, own=own, micro_batch_size=micro, microbatches=steps)

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        raise LaunchError(f"fsdp2 {NO_PROGRAM}")


def _without_shards(task: Task) -> list[str]:
    """Return a line for several devices and a framework's command of one, on which it would share no weights."""
    if kept_framework(task.spec) is None or task.cluster.devices == 1:
        return []
    read = reading(task.spec)
    text = N_(
        "train.command has no FSDP, so that each of the {devices} devices would hold all weights: give the command its "
        "number of processes, such as --num_processes {devices}, and import it again, or set its FSDP"
    )
    return [] if read.is_on("fsdp") or read.size(fs.EP) > 1 else [_(text, devices=task.cluster.devices)]


def _whole_gradients(task: Task) -> list[str]:
    """Return a line if accelerate reduces gradients only after the last of several micro-batches, which depends on its
    release: 1.10 does so after each.
    """
    read = reading(task.spec) if kept_framework(task.spec) else None
    if read is None or read.is_on("synchronizes") or task.spec.train.adapter or not read.is_on("fsdp"):
        return []
    text = _(
        "gradients of all weights stay whole on each rank until the last micro-batch (~{size:.3g} GiB): accelerate"
        " before 1.11, or {key}, keeps only shares of them",
        size=2.0 * parameters(task.spec.model) / 2**30,
        key=read.keys["synchronizes"].names[0].lstrip("!"),
    )
    return [text] * (read.size("accumulation") > 1)


def _without_depths(task: Task) -> list[str]:
    """Return a line for a model with multi-token prediction, which programs with `fully_shard` do not train."""
    depths = task.spec.model.mtp_num_layers + (task.spec.train.untrained_depths or 0)
    return [_("fsdp2 trains no multi-token prediction: mtp_num_layers = {depths} does nothing", depths=depths)] * (
        depths > 0
    )


FSDP2 = Fsdp2()
