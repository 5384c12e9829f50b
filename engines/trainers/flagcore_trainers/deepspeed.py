"""The engine `deepspeed`: a user's script, whose candidates are changed copies of its DeepSpeed configuration.

Sources: DeepSpeed 0.19 `runtime/config.py`, `runtime/zero/config.py` and `runtime/engine.py`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_importers.dialect import SUFFIXES
from flagcore_models.layers import attention_counts, head_of, table_products
from flagcore_training.adapters import as_noted
from flagcore_training.commands import parse
from flagcore_training.frameworks import framework_of, kept_framework, moments_of, reading, refuse_trials
from flagcore_training.knobs import RuleTable
from flagcore_training.lengths import length_warnings
from flagcore_training.real_job import changed, launch
from flagcore_training.time.step import replica_wait

from flagcore.contracts import Commands, Costs, Engine, Platform, Published
from flagcore.domain.engine import Unmodelled
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Launch, Start
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.errors import SpecError
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import Notes, lookup, package_yaml
from flagcore_trainers import framework, start
from flagcore_trainers.fully_shard import AC
from flagcore_trainers.fully_shard.memory import LOSS_BYTES
from flagcore_trainers.fully_shard.traffic import INTERVAL, with_torch_attention
from flagcore_trainers.fully_shard.weights import modules_of_layers, small_weights
from flagcore_trainers.importing import DEEPSPEED as DEEPSPEED_SETTINGS
from flagcore_trainers.importing import MICRO as MICRO_FLAG
from flagcore_trainers.importing import MICRO_KEY, Imported, check_sizes, effects_of_deepspeed, spec_of_deepspeed
from flagcore_trainers.meaning import RECOMPUTE, WholeModel, layout_of, training, weights_of_rank, with_fused_kernels
from flagcore_trainers.program import KnobRow, StateSection
from flagcore_trainers.recipes import on_deepspeed
from flagcore_trainers.trainer import Trainer

FLAGS = ("--deepspeed_config", "--deepspeed-config", "--ds_config", "--ds-config", "--deepspeed")
"""The flags that name the configuration file. HF Trainer uses the last one."""
ZERO, MICRO, OFFLOAD = "zero_stage", "micro_batch_size", "offload_optimizer"
STAGE_KEY = "zero_optimization.stage"
OVERLAP, BUCKET = "overlap_comm", "reduce_bucket_size"
HPZ, QUANTIZED = "zero_hpz_partition_size", ("zero_quantized_weights", "zero_quantized_gradients")
"""ZeRO++: ranks that also hold a second copy of all weights, and 8-bit gathers and 4-bit reductions."""
AUTOTP, ULYSSES = "tensor_model_parallel_size", "context_parallel_size"
"""Sizes of AutoTP, and of Ulysses' sequence parallelism, which the script has to support."""
LEAST_STAGE = {OVERLAP: 1, BUCKET: 1, **dict.fromkeys((HPZ, *QUANTIZED), 3)}
"""The lowest stage of ZeRO that does not ignore a setting."""
PROGRAM: Mapping[str, Any] = package_yaml(__package__, "deepspeed.yaml")["program"]
NAMES = {"AUTOTP": AUTOTP, "HPZ": HPZ, "OFFLOAD": OFFLOAD, "ULYSSES": ULYSSES, "ZERO": ZERO}
rule = RuleTable(__package__, NAMES)


class DeepSpeedCommands(Commands):
    """Reads commands that pass a configuration of DeepSpeed to a script that is not Megatron-LM's."""

    keeps_scripts = True

    def role(self, command: Sequence[str], directory: str) -> str | None:
        if framework_of(command):  # read with its own arguments
            return None
        named = [value for flag in FLAGS if isinstance(value := start.flag_value(command, flag), str)]
        program = parse(command, directory)
        is_own = any(Path(each).suffix in SUFFIXES for each in named) and not (program and program.is_megatron)
        return "" if is_own else None

    def read(self, start: Start, directory: Path, model: str | None) -> Imported:
        return spec_of_deepspeed(start, FLAGS, directory, model)


class DeepSpeedPlans(WholeModel):
    """Plans, also for commands that a spec keeps for the real job."""

    def only(self, spec: Spec) -> bool:
        return super().only(spec) or kept_framework(spec) is not None


class DeepSpeed(Trainer):
    """Training with a script that calls `deepspeed.initialize`."""

    plans = DeepSpeedPlans()
    commands = DeepSpeedCommands()
    distribution = "deepspeed"
    modules: Mapping[str, str] = {"deepspeed": "deepspeed"}
    releases = ">=0.10,<0.20"

    def with_program(self, program: object) -> Engine:
        """Return the engine with further knobs, keys and arguments of `program`."""
        given = {} if program is None else program
        if not isinstance(given, Mapping):
            return super().with_program(given)
        merged = {**PROGRAM, **given}
        for name in ("knobs", "trial_keys"):
            if isinstance(merged[name], Mapping):
                merged[name] = {**PROGRAM[name], **merged[name]}
        own = given.get("knobs")
        own = own if isinstance(own, Mapping) else {}
        stated = [row.get("meaning", name) for name, row in own.items() if isinstance(row, Mapping) and name != AC]
        if RECOMPUTE in (*stated, *(given.get("fixed") or ())):  # the script's own
            merged["knobs"] = {name: row for name, row in merged["knobs"].items() if name != AC}
        engine = super().with_program(merged)
        only_listed = {*QUANTIZED, AUTOTP, ULYSSES, AC} - {*own}  # the script has to have them
        engine.knobs = tuple(_unless_listed(each) if each.name in only_listed else each for each in engine.knobs)
        return engine

    def config_of(self, spec: Spec) -> str | None:
        """Return the path of the configuration file that the command names. Raises SpecError."""
        if (config := super().config_of(spec)) != "auto":
            return config
        for flag in FLAGS:
            if isinstance(value := start.flag_value(spec.train.command or (), flag), str) and value:
                return value
        fix, problem = f"add {FLAGS[0]} ds_config.json", _("names no configuration file of DeepSpeed")
        if spec.train.command is None:
            fix, problem = f"write the command of your program, with {FLAGS[0]} ds_config.json", _("is missing")
        raise SpecError(key="train.command", problem=problem, fix=f"{fix}, or set train.program.config")

    def spec_warnings(self, spec: Spec) -> Sequence[str]:
        words, directory = spec.train.command or (), Path(spec.train.directory or ".")
        own = [f"train.command: {each}" for each in start.own_configurations(words, directory)]
        usual = f"train.program.knobs.{AC} "  # one value is the script's own, which no trial changes
        return [*(each for each in super().spec_warnings(spec) if not each.startswith(usual)), *own]

    def ready(self, spec: Spec) -> None:
        refuse_trials(spec)
        super().ready(spec)

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        spec, values = platform.task.spec, candidate.as_dict()
        if kept_framework(spec) is None or not for_real:
            return super().launch(platform, candidate, folder, for_real=for_real)
        read = reading(spec)
        own = on_deepspeed(read, spec.model.hidden_size, Notes())[1]
        found = self.numbers(platform.task, self.columns(platform.task, values))
        numbers = {name: int(each[0]) for name, each in found.items()}
        config = None
        if own[ZERO] or values[ZERO] or values[OFFLOAD] != "none":
            config = changed(framework.ds_config(read), self._keys(platform.task, candidate, for_real=True))
        return launch(
            spec,
            folder,
            given={name: values[name] for name in (AC, AUTOTP, ULYSSES)},
            own={AUTOTP: 1, ULYSSES: 1, **own},
            micro_batch_size=numbers[MICRO],
            microbatches=numbers["gradient_accumulation_steps"],
            config=config,
        )

    def unmodelled(self, task: Task) -> Sequence[Unmodelled]:
        command, train = self.command(task.spec), task.spec.train
        found = effects_of_deepspeed((*command.words, *train.flags), command.content)
        return [*found, *DEEPSPEED_SETTINGS.of_environment(task.spec), *framework.fp32_products(task)]

    def command(self, spec: Spec) -> start.Command:
        """Return the user's command, or an empty one if trials cannot start it."""
        if spec.train.command is None or kept_framework(spec):
            return start.Command(words=(), directory=".")
        command = super().command(spec)
        stage = lookup(command.content, STAGE_KEY)
        if stage not in (None, "auto", 0, 1, 2, 3):
            fix = f"correct {command.config}"
            raise SpecError(key=STAGE_KEY, value=stage, problem=_("is not a stage of ZeRO from 0 to 3"), fix=fix)
        check_sizes(command.content, command.config)
        return command

    def content(self, spec: Spec) -> Mapping[str, Any]:
        """Return the configuration of DeepSpeed that the command names, or an empty one if no file here has it."""
        if kept_framework(spec):
            return framework.ds_config(reading(spec))
        with suppress(SpecError):
            return self.command(spec).content
        return {}

    def states(self, task: Task) -> StateSection:
        """Return the bytes of the states. Muon, which the configuration may name, has no second moments of matrices.

        The scales of moments in 8 bits are left out.
        """
        is_muon = str(lookup(self.content(task.spec), "optimizer.type")).lower() == "muon"
        moments = moments_of(task.spec)
        narrow = {"moments": int(moments[0].of(4.0)), "fused_adam": True} if moments else {}
        return super().states(task).model_copy(update={"muon": True} if is_muon else narrow)

    def _own_values(self, spec: Spec) -> Iterator[tuple[KnobRow, Knob, Any, KnobValue | None]]:
        for row, knob, given, value in super()._own_values(spec):
            is_auto = knob.name == ZERO and given == "auto"
            yield row, knob, given, AUTO_STAGE * _is_filled_in(spec, self.content(spec)) if is_auto else value

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the values of the configuration. Without `overlap_comm`, only ZeRO 3 overlaps, as in DeepSpeed."""
        space = dict(super().usual_space(task))
        set_value = lookup(self.command(task.spec).content, f"zero_optimization.{OVERLAP}")
        if set_value is None and space.get(ZERO) == (3,) and OVERLAP in space:
            space[OVERLAP] = (True,)
        return space

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        found, numbers = super().predict(task, columns, costs), self.numbers(task, columns)
        if (numbers[AUTOTP] > 1).any():
            found = _with_whole_embedding(task, numbers, self.states(task), found)
        return _with_exchange(found, self._exposed_seconds(task, columns, costs, numbers, found))

    def buffers(self, task: Task, columns: Columns, numbers: Mapping[str, IntArray]) -> Mapping[str, FloatArray]:
        """Return the bytes of gathered weights and of the buffers in which a backward collects gradients.

        ZeRO 3 prefetches weights until `stage3_max_live_parameters` are gathered, and keeps what it meets again on the
        way; a table may exceed this. Without prefetches, the last half of a distance stays, and the head. Prefetched
        weights are copied from a buffer. With hpZ, a rank also has a share of a second copy, but for small weights,
        which stay whole. ZeRO 3 allocates the buffer of gradients once. Others do in the backward of the first
        micro-batch, ZeRO 1 until the step; two if exchanges overlap. Between steps, they have no gradients. ZeRO also
        has main weights of trained fp32 weights. A bucket has its size with adapters, too. In the step, the gradients
        of a group are concatenated, and the result is copied to fp32: 6.0 bytes per 16-bit weight counted on two ranks.
        An optimizer on the host has the gradients that ranks share, and weights may be there, too. `cached`: with
        overlap, ZeRO 3 gathers and reduces on streams of their own, whose blocks the allocator gives to no other.
        `apart`: by how much these exceed gathered weights, and the loss, if its blocks are too small for the gradient
        of a table. Source: DeepSpeed 0.19.8 `partitioned_param_coordinator.py`, `partition_parameters.py`, `stage3.py`
        and `stage_1_and_2.py` of `runtime/zero`, `runtime/comm/coalesced_collectives.py`.
        """
        u = 4.0 if task.spec.train.precision == "fp32" else 2.0
        layout, zero, model = layout_of(numbers), numbers[ZERO], task.spec.model
        content, is_zero_3, is_on_host = self.content(task.spec), zero == 3, numbers[OFFLOAD] == 1
        sizes = _sizes_of_zero(task.spec, content)
        small = small_weights(model, sizes[PERSISTENT])
        train = training(task, 3, 0, self.states(task))
        weights = weights_of_rank(train, layout) - small
        prefetch = min(sizes[PREFETCHED], sizes[LIVE])
        kept = sizes[LIVE] if prefetch else sizes[REUSED] / 2.0
        table = table_products(model)[0].weights
        live = np.minimum(weights, max(kept, table) + prefetch) + small
        groups = np.maximum(columns.get(HPZ, 1), 1)
        count, ranks = weights_of_rank(train, layout, only_trained=True), layout.data * layout.context
        gathered = np.where(is_zero_3 & (ranks > 1), u * (live + weights / groups * (groups > 1)), 0.0)
        prefetched = np.where(is_zero_3 & (ranks > 1), u * np.minimum(weights, prefetch), 0.0)
        overlaps = columns.get(OVERLAP, 0) != 0
        bucket = columns.get(BUCKET, 0) * u * (1.0 + overlaps * (zero < 3)) * (zero > 0)
        stays = np.where(is_zero_3 | ((zero == 1) & (layout.microbatches > 1)), bucket, 0.0)
        main = np.where(zero > 0, 4.0 * count / ranks, 0.0) * (u == 4.0)
        gradients = (u if u == 4.0 else self.states(task).gradients) * count / np.where(zero == 2, ranks, 1.0)
        group = np.where(is_zero_3, np.minimum(count / ranks, sizes[GROUP]), count / np.where(zero > 0, ranks, 1.0))
        step = np.where(is_on_host, 0.0, (u * (zero > 0) + 4.0 * (u == 2.0)) * group)
        host = np.where(is_on_host & (zero > 1), (u if u == 4.0 else 2.0) * count / ranks, 0.0)
        if lookup(content, f"zero_optimization.{PARAMETERS}.device") in ("cpu", "nvme"):
            host = host + np.where(is_zero_3, u * weights / ranks, 0.0)
        between = main + np.where(is_zero_3, bucket + u * small, -gradients)
        head, tokens = head_of(model), layout.tokens(task.spec.train.seq_length)
        whole = tokens * head.logits * (not train.options.tiled_loss)
        logits = whole * (1.0 - 1.0 / numbers[AUTOTP]) * (not head.tied)
        moments = {
            "between": between,
            "step": step + np.maximum(between, 0.0),
            "forward": main + gathered + prefetched + stays,
            "loss": main + gathered + stays + (LOSS_BYTES + head.kept(u)) * logits,
            "head": main + gathered + bucket + u * logits,
            "layer": main + gathered + bucket,
            "end": main + bucket,
        }
        cached = np.where(is_zero_3 & overlaps, gathered + prefetched + bucket, 0.0)
        apart = np.where(is_zero_3 & overlaps, u * (np.minimum(weights, kept + table) + small - live), 0.0)
        apart = np.maximum(apart, 0.0) + np.where(is_zero_3 & (4.0 * whole < u * table), LOSS_BYTES * whole, 0.0)
        return {name: each - host for name, each in moments.items()} | {"cached": cached, "apart": apart}

    def _exposed_seconds(
        self, task: Task, columns: Columns, costs: Costs, numbers: Mapping[str, IntArray], found: Predictions
    ) -> FloatArray:
        """Return the exposed seconds per step in which gradients are reduced and weights are gathered.

        Below ZeRO 3, buckets are all-reduced: by ZeRO 2 for each micro-batch, by others for the last one. Only
        `overlap_comm` does so beside the backward. Then ranks gather the weights that they updated. Source: DeepSpeed
        0.19 `runtime/zero/stage_1_and_2.py`, `process_gradients` and `average_tensor`. ZeRO 3 without
        `overlap_comm` reduces gradients on the stream of the backward (0.19 `runtime/zero/stage3.py`). It runs hooks of
        each module on the host, for which small micro-batches wait.
        """
        layout, zero = layout_of(numbers), numbers[ZERO]
        whole = training(task, 0, 0, self.states(task))
        weights, trained = (weights_of_rank(whole, layout, only_trained=each) for each in (False, True))
        u = 4.0 if task.spec.train.precision == "fp32" else 2.0
        ring = ((layout.data * layout.context).astype(np.int64), layout.tensor.astype(np.int64))
        reduce = costs.collectives.seconds("all_reduce", u * trained, *ring)
        gather, update = (costs.collectives.seconds("all_gather", u * each, *ring) for each in (weights, trained))
        beside = (zero > 0) & (columns.get(OVERLAP, np.zeros_like(zero)) != 0) & (not costs.synchronous)
        backward = found.time_s["compute_s"] / layout.microbatches * 2.0 / 3.0
        hidden = np.where(beside, np.minimum(reduce, backward), 0.0)
        alone = reduce - hidden + costs.collectives.compute_share(*ring) * hidden
        seconds = np.where(zero == 2, layout.microbatches, 1.0) * alone + update * (zero > 0)
        scatter = costs.collectives.seconds("reduce_scatter", u * trained, *ring)
        inline = np.where(columns.get(OVERLAP, np.ones_like(zero)) == 0, layout.microbatches * scatter, 0.0)
        given = (with_fused_kernels(training(task, stage, 0, self.states(task))) for stage in (0, 3))
        own = with_torch_attention(task, costs)
        waits = [replica_wait(each, layout, own, found.time_s, each_micro_batch=each.options.fsdp) for each in given]
        sharded = np.maximum(found.time_s[EXCHANGE] - waits[1], inline)
        if costs.synchronous:  # the host computes and sends
            sharded = layout.microbatches * (2.0 * gather + scatter)
        passes = np.where(layout.uniform > 0, 1.5, 1.0)  # checkpoints run the hooks of a forward again
        host = HOOK_SECONDS * modules_of_layers(task.spec.model) * passes
        work = 0.0 if costs.synchronous else found.step_time_s / layout.microbatches  # the host runs ahead of a device
        hooks = layout.microbatches * np.maximum(host - work, 0.0) * (layout.data > 1)
        return np.where(zero == 3, sharded + hooks + waits[1], seconds + waits[0])

    def published(self, task: Task, values: Mapping[str, KnobValue], notes: str) -> Published:
        task, noted = as_noted(task, notes)
        return Published(
            task, dict(values), noted, [*length_warnings(task.spec.train, noted), *framework.expert_warnings(task)]
        )

    def task_warnings(self, task: Task) -> Sequence[str]:
        lines = [*super().task_warnings(task), *framework.expert_warnings(task), *framework.loss_warnings(task)]
        device = lookup(self.content(task.spec), "zero_optimization.offload_optimizer.device")
        if device in ("cpu", "nvme") or "cpu" in task.spec.space.get(OFFLOAD, ()):
            text = N_("with the optimizer on the host, memory may be 1.4 times the prediction: {source}")
            lines.append(_(text, source="LLaMA-Factory issue 5977: 13 GB, 9.1 GiB"))
        return lines

    def rules(self, task: Task) -> tuple[Rule, ...]:
        content = self.content(task.spec)
        scatters = self.states(task).muon and lookup(content, SCATTERS) is not False
        devices, model, length = task.cluster.devices, task.spec.model, task.spec.train.seq_length
        heads = (each.num_heads for each in attention_counts(model))
        shared, groups = math.gcd(length, model.num_attention_heads, *heads), model.num_query_groups
        has_no_plan = bool(model.experts) and lookup(content, "tensor_parallel.partition_config") is None
        is_script = kept_framework(task.spec) is None  # whose DistributedAttention may divide KV heads unevenly

        def uneven(columns: Columns) -> BoolArray:  # 0.19.8 `sequence_parallel/ulysses_sp.py`, of transformers' Trainer
            size = np.maximum(columns.get(ULYSSES, 1), 1)
            return np.asarray((groups % size != 0) & (size % groups != 0) & (not is_script))

        return (
            *super().rules(task),
            rule("offload_needs_zero", lambda c: np.less(*(self.numbers(task, c)[each] for each in (ZERO, OFFLOAD)))),
            rule("muon_scatters", lambda c: (self.numbers(task, c)[ZERO] == 3) & scatters, key=SCATTERS),
            rule("hpz_groups", lambda c: devices % np.maximum(c[HPZ], 1) != 0, devices=devices),
            rule("ulysses", lambda c: shared % np.maximum(c.get(ULYSSES, 1), 1) != 0, shared=shared),
            rule("ulysses_groups", uneven, groups=groups),
            rule("autotp_experts", lambda c: np.asarray((c.get(AUTOTP, 1) > 1) & has_no_plan)),
            rule("autotp_or_ulysses", lambda c: np.asarray((c.get(AUTOTP, 1) > 1) & (c.get(ULYSSES, 1) > 1))),
        )

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return the merge of candidates whose stage of ZeRO ignores a setting."""
        neutral = {knob.name: knob.axis(()).encode(knob.neutral) for knob in self.knobs if knob.name in LEAST_STAGE}

        def canonical(columns: Columns) -> Columns:
            stage = self.numbers(task, columns)[ZERO]
            return {name: np.where(stage < LEAST_STAGE[name], code, columns[name]) for name, code in neutral.items()}

        return (Merge(name="ignored_by_stage", knobs=(ZERO, *neutral), canonical=canonical),)

    def further_keys(self, task: Task, candidate: Candidate) -> dict[str, Any]:
        """Return the global batch size, the number of micro-batches, and the size of groups.

        accelerate sets a number of micro-batches that is missing to 1 (1.15.0 `utils/dataclasses.py`), with which
        DeepSpeed refuses the global batch size. A group of 1 is left out. Before its groups exist, AutoTP counts all
        ranks as replicas. `data_parallel_size` is left out: with it, DeepSpeed does not add gradients up over the ranks
        of a sequence.
        """
        values, batch = candidate.as_dict(), task.spec.train.global_batch_size
        tensor, sequence = (int(values.get(name) or 1) for name in (AUTOTP, ULYSSES))
        microbatches = int(self.numbers(task, self.columns(task, values))["gradient_accumulation_steps"][0])
        keys: dict[str, Any] = {"train_batch_size": batch * tensor, "gradient_accumulation_steps": microbatches}
        if tensor == 1:
            keys["tensor_parallel.autotp_size"] = None
        return keys | {"data_parallel_size" if sequence > 1 else "sequence_parallel_size": None}


SCATTERS = "zero_optimization.reduce_scatter"
"""On by default, and refused by ZeRO 3 with Muon (DeepSpeed 0.19.8 `runtime/zero/stage3.py`)."""
GROUP, PARAMETERS = "sub_group_size", "offload_param"
REUSED, LIVE, PREFETCHED, PERSISTENT = (
    f"stage3_{name}"
    for name in ("max_reuse_distance", "max_live_parameters", "prefetch_bucket_size", "param_persistence_threshold")
)
SIZES_OF_ZERO = {GROUP: 1e9, REUSED: 1e9, LIVE: 1e9, PREFETCHED: 5e7, PERSISTENT: 1e5}
"""Sizes of ZeRO 3 in elements, with the defaults of DeepSpeed 0.19.8 `runtime/zero/config.py`."""
AUTO_STAGE = 2
"""What accelerate fills in for a stage that is `auto` (1.15 `utils/dataclasses.py`). DeepSpeed's own default is 0."""
PEAKS = ("peak_allocated_bytes", "reserved_bytes", "device_used_bytes")
"""Predictions of a peak of memory, in bytes."""
EXCHANGE = "dp_comm_exposed_s"
HOOK_SECONDS = 0.9e-3
"""Host seconds of ZeRO 3 per module and micro-batch, with 14 modules in a layer of Llama.

From three candidates of DeepSpeed 0.19 on two CPU cores: 0.8 to 1.0 ms. Published runs of DeepSpeed 0.11 with
micro-batches of 256 to 768 tokens need 0.2 to 0.5 ms more."""


def _is_filled_in(spec: Spec, content: Mapping[str, Any]) -> bool:
    """Return whether Hugging Face's Trainer starts DeepSpeed, and fills in what is `auto`."""
    command = spec.train.command or ()
    rows = spec.train.program.get("knobs", {}) if isinstance(spec.train.program, Mapping) else {}
    words = " ".join((*command, *spec.train.flags, str(rows)))
    return MICRO_FLAG in words or framework_of(command) is not None or content.get(MICRO_KEY) == "auto"


def _sizes_of_zero(spec: Spec, content: Mapping[str, Any]) -> dict[str, float]:
    """Return the sizes of ZeRO 3 in elements. Hugging Face's Trainer fills in two of them for `auto`.

    Source: transformers 5.24 `integrations/deepspeed.py`.
    """
    hidden, found = spec.model.hidden_size, dict(SIZES_OF_ZERO)
    for name in found:
        value = lookup(content, f"zero_optimization.{name}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value)
        elif value == "auto" and _is_filled_in(spec, content):
            found[name] = {PREFETCHED: 0.9 * hidden**2, PERSISTENT: 10.0 * hidden}.get(name, found[name])
    return found


def _unless_listed(knob: Knob) -> Knob:
    """Return a knob of which the search tries only the neutral value, unless the space lists others.

    Plans without a script recompute, too: each framework can.
    """
    neutral, every, is_free = knob.neutral, knob.auto, knob.name == AC
    auto_help = f"{neutral}, without a command also full" if is_free else str(neutral).lower()

    def auto(task: Task) -> Sequence[KnobValue]:
        return every(task) if is_free and every and not task.spec.train.command else (neutral,)

    return replace(knob, auto=auto, auto_help=auto_help)


def _with_exchange(found: Predictions, seconds: FloatArray) -> Predictions:
    total = found.step_time_s + seconds - found.time_s[EXCHANGE]
    low, high = (total * share for share in INTERVAL)
    return replace(found, step_time_s=total, low_s=low, high_s=high, time_s={**found.time_s, EXCHANGE: seconds})


def _with_whole_embedding(
    task: Task, numbers: Mapping[str, IntArray], states: StateSection, found: Predictions
) -> Predictions:
    """Return predictions with a whole embedding, which AutoTP splits only if it is also the head.

    Run with 0.19.8 and transformers 5.24: it splits the head, and gathers the logits unless it is tied.
    """
    model, u = task.spec.model, 4 if task.spec.train.precision == "fp32" else 2
    tables = table_products(model)[0].weights * (not head_of(model).tied)
    replicas, stage = np.maximum(numbers["data_parallel_size"], 1), numbers[ZERO]
    shares = [np.where(stage >= least, replicas, 1) for least in (3, 2, 1)]
    main = (states.main_weights if u == 2 else 0) + states.moments
    each = u / shares[0] + (states.gradients if u == 2 else 4) / shares[1] + main / shares[2]
    extra = tables * (1.0 - 1.0 / numbers[AUTOTP]) * each
    return replace(found, **{name: getattr(found, name) + extra for name in ("static_bytes", *PEAKS)})


DEEPSPEED = DeepSpeed("deepspeed").with_program(None)
