"""Megatron as an engine of the core, with the parts that it asks for separately: bounds, plans, reader of commands.

For any model, a larger micro-batch and an unsharded gradient buffer or optimizer need more memory. Sequence parallelism
adds a buffer, which may be larger than the memory that it saves when layers are recomputed in full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_models.layers import attention_counts
from flagcore_training.adapters import absent_targets
from flagcore_training.commands import parse
from flagcore_training.frameworks import kept_framework
from flagcore_training.lengths import cut_warnings
from flagcore_training.reading import FAILURES, compared

from flagcore.contracts import Bounds, Commands, Costs, Engine, Plans, Platform, PruningRule, Published, Steps
from flagcore.domain.engine import Unmodelled
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Launch, Start
from flagcore.domain.model import Model
from flagcore.domain.prediction import Components, Labels, ModelPart, Passes, Predictions
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import AUTO, ImportNote, SettingValue, Spec, Task
from flagcore.domain.trial import Answers, Measurement
from flagcore.domain.work import Work
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import package_yaml
from flagcore_megatron import predict as prediction
from flagcore_megatron import reading, start
from flagcore_megatron.command import checks
from flagcore_megatron.mixed.planner import notes as mesh_notes
from flagcore_megatron.mixed.planner import values_alone
from flagcore_megatron.mixed.planner import with_meshes as with_planned_meshes
from flagcore_megatron.mixed.rules import merges_with_meshes, with_meshes
from flagcore_megatron.program.user_command import unmodelled
from flagcore_megatron.space import knobs, meshes, options, production
from flagcore_megatron.space import rules as legality
from flagcore_megatron.space.knobs import BLOCK, SELECTIVE, SPACE_KNOBS, candidate_columns
from flagcore_megatron.space.meshes import CP, DP, EP, MICROBATCHES, PP, SP, TP
from flagcore_megatron.space.rules import DIST_OPT, RECOMPUTE, settings_with_rules
from flagcore_megatron.space.split import SPLIT
from flagcore_megatron.start import MegatronProbes

LABELS = Labels(
    components=package_yaml(__package__, "components.yaml"),
    measured_parts={"forward_backward_s": N_("forward and backward"), "optimizer_s": N_("optimizer")},
    memory_line=(
        "Theoretical memory footprints: weight and optimizer={static_mb:.2f} MB, "
        "activation={activation_mb:.2f} MB, total={total_mb:.2f} MB"
    ),
)
"""Names of the parts of a prediction in tables. `memory_line` has the format of Megatron-LM's own memory report."""


class MegatronBounds(Bounds):
    """Bounds for all values of the knobs of recompute."""

    knobs = tuple(knob.name for knob in SPACE_KNOBS if knob.name not in meshes.RECOMPUTE_KNOBS)

    def seconds(self, task: Task, columns: Columns, costs: Costs) -> FloatArray:
        return prediction.least_seconds(task, columns, costs)

    def share(self, task: Task, columns: Columns, costs: Costs) -> FloatArray:
        return prediction.least_share(task, columns, costs)


class MegatronPlans(Plans):
    """Plans as production jobs run: with settings of published recipes, on meshes of several node groups."""

    labels = LABELS

    def read_flags(self, text: str, spec: Spec) -> tuple[str, Mapping[str, SettingValue], Sequence[str]]:
        from flagcore_megatron.importing.command import read_flags  # other commands do not need it

        return read_flags(text, spec)

    def in_space(self, values: Mapping[str, KnobValue], model: Model) -> Mapping[str, KnobValue]:
        return knobs.in_space(values, model)

    def only(self, spec: Spec) -> bool:
        has_no_program = spec.train.command is None and knobs.names_several_chips(spec)
        return has_no_program or kept_framework(spec) is not None

    def runs_as(self, spec: Spec) -> str:
        return production.runs_as(spec)

    def assumed(self, task: Task, candidate: Candidate) -> Mapping[str, SettingValue]:
        return production.assumed(task, candidate)

    def without_command(self, spec: Spec) -> Work:
        return production.without_command(spec)

    def unusual(self, task: Task, columns: Columns, predictions: Predictions) -> FloatArray:
        return production.unusual(task, columns, predictions)

    def model(self, task: Task) -> tuple[ModelPart, ...]:
        return prediction.model_parts(task)

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        return prediction.components(task, columns, stages, costs)

    def pipelines(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Passes]:
        return prediction.pipelines(task, columns, costs)

    def stage_layers(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
        return prediction.stage_layers(task, columns, costs)

    def space_alone(
        self, task: Task, group: int, space: Mapping[str, str | tuple[KnobValue, ...]]
    ) -> Mapping[str, str | tuple[KnobValue, ...]]:
        alone = {**values_alone(task, group), **space}
        return {name: values for name, values in alone.items() if name != meshes.MESHES}

    def splits(self, task: Task, columns: Columns) -> Mapping[str, BoolArray]:
        return meshes.splits(task, columns)


class MegatronCommands(Commands):
    """Reads commands of Megatron-LM and of programs with its arguments."""

    keeps_scripts = True

    def role(self, command: Sequence[str], directory: str) -> str | None:
        parsed = parse(command, directory)
        return "" if parsed is not None and parsed.is_megatron else None

    def read(self, start: Start, directory: Path, model: str | None) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        from flagcore_megatron.importing.command import spec_of_command  # other commands do not need it

        return spec_of_command(start, directory, model)


@dataclass(frozen=True)
class UselessSelectiveRecompute:
    """A rule that excludes selective recompute of only the attention core, which flash attention always recomputes."""

    task: Task
    name = "selective_recompute_with_flash_attention"
    message = N_("flash attention stores no attention core, so recomputing it costs time and saves nothing")

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        selective: BoolArray = columns["recompute_granularity"] == SELECTIVE
        settings, modules = options.settings_in_force(self.task.spec), "recompute_modules"
        if knob := next((each for each in self.task.knobs if each.name == modules), None):  # its values are compared
            axis = knob.axis((knob.neutral,), extra_values=knob.values)
            core = [value for value in knob.values if options.recompute_modules({**settings, modules: value}) == CORE]
            return selective & np.isin(columns[modules], [axis.encode(value) for value in core])
        return selective & (options.recompute_modules(settings) == CORE)


CORE = frozenset({"core_attn"})
NATURAL = "the loads of experts on real text are assumed, which differ by model and data; set 1 if balance is forced"
"""Up to 1.9: DeepSeek-V2-Lite on eight devices took 1.8 times as long as with forced balance (AMD-AGI/Primus @fd1eeabb
`examples/megatron/configs/MI355X`)."""
TEXT_ONLY = "the vision tower and images are left out: see images_per_sequence, image_width and image_height"


class Megatron(Engine):
    """Training with megatron-core, or with a user's own Megatron-LM command."""

    name = "megatron"
    kind = "train"
    knobs: tuple[Knob, ...] = knobs.KNOBS
    modules: Mapping[str, str] = start.MODULES
    failures = FAILURES
    replicas = DP
    count_column = MICROBATCHES
    """The column in which rows may have another number of micro-batches than the global batch of their task gives."""

    plans = MegatronPlans()
    bounds = MegatronBounds()
    commands = MegatronCommands()
    probes = MegatronProbes()

    # The spec

    def check_values(self, spec: Spec) -> None:
        checks.check_values(spec)

    def complete(self, platform: Platform, *, runs_here: bool, plan: bool) -> Platform:
        platform = platform if runs_here else production.as_in_production(platform)
        return with_planned_meshes(start.as_installed(platform), plan=plan)

    def warnings(self, task: Task) -> Sequence[str]:
        lines = [*checks.spec_warnings(task.spec), *mesh_notes(task), *cut_warnings(task.spec.train)]
        if task.spec.model.experts and options.is_natural(task.spec, options.settings_in_force(task.spec)) is None:
            lines.append(_("experts are predicted with equal loads: real data takes longer (moe_expert_imbalance)"))
        chips = [each.chip for each in task.cluster.groups if not each.chip.architecture.startswith(production.WITH_TE)]
        if chips and task.spec.train.implementation == production.IMPLEMENTATION and task.spec.train.assumed:
            text = N_(
                "layers are predicted as Transformer Engine's: what those of {chip}'s own software keep is not known"
            )
            lines.append(_(text, chip=chips[0].name))
        checks.check_variables(task)
        attention, length = attention_counts(task.spec.model), task.spec.train.seq_length
        narrow = [each for each in attention if each.window and each.window < length]
        if narrow and not prediction.training(task).model.layers:
            program = _("flagcore's trial program has no sliding windows")
        elif any(each.pieces for each in narrow):
            program = _("Megatron-LM has no attention to pieces")
        else:
            return lines
        return [*lines, _("{program}: its layers, and predictions, attend to all tokens", program=program)]

    def unmodelled(self, task: Task) -> Sequence[Unmodelled]:
        found = unmodelled(task.spec)
        if task.spec.model.experts and options.is_natural(task.spec, options.settings_in_force(task.spec)):
            found.append(Unmodelled(name="moe_expert_imbalance", why=NATURAL, time=(1.0, 1.9)))
        if task.spec.model.vision is not None:
            why = "" if options.tower(task.spec.model, options.settings_in_force(task.spec)) else TEXT_ONLY
            found.append(Unmodelled(name="model.vision_config", why=why, time=(1.0, 1.3) if why else (1.0, 1.0)))
        return found

    # The search space

    def axes(self, task: Task) -> tuple[Axis, ...]:
        return knobs.axes(task)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        absent_targets(task.spec.model, task.spec.train.adapter)
        options.check(task, options.settings_in_force(task.spec))
        # Assumed settings are used only by candidates for which they are legal, so they make no candidate illegal.
        of_settings = (rule for rule in settings_with_rules(task) if rule.name not in task.spec.train.assumed)
        return with_meshes(task, (*legality.rules(task), *of_settings))

    def merges(self, task: Task) -> tuple[Merge, ...]:
        return merges_with_meshes(task, legality.merges(task))

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        return knobs.columns(task, values)

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        return (UselessSelectiveRecompute(task),) if task.spec.train.attention == "flash" else ()

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        other = candidate_columns(candidate.as_dict())
        same = (columns[SP] == other[SP]) | ((_recompute_level(columns) < 2) & (_recompute_level(other) < 2))
        result: BoolArray = _ordered_at_least(columns, other, MEMORY_ORDER) & _recomputes_at_most(columns, other) & same
        return result

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        other = candidate_columns(candidate.as_dict())
        return _ordered_at_least(columns, other, {}) & _recomputes_at_most(other, columns)

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the values that an expert would consider, for each knob.

        The values are all sizes of TP, PP, DP and EP, sizes of CP with USUAL_TOKENS per rank, micro-batch size 1,
        and the distributed optimizer and full recompute on and off.
        """
        neutral: dict[str, tuple[KnobValue, ...]] = {knob.name: (knob.neutral,) for knob in SPACE_KNOBS}
        auto = (DP, TP, PP, EP, SP, DIST_OPT, RECOMPUTE)
        neutral[SPLIT] = (None, "balanced")
        most = task.spec.train.seq_length // production.USUAL_TOKENS
        neutral[CP] = tuple(1 << power for power in range(max(most.bit_length(), 1)))
        recompute: tuple[tuple[KnobValue, ...], ...] = (("full",), ("uniform",), (1,))
        full = dict(zip(meshes.RECOMPUTE_KNOBS[1:], recompute, strict=True))
        return {**neutral, **dict.fromkeys(auto, AUTO), **full}

    def rule_of_thumb(self, task: Task, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the candidate in `columns` with the smallest TP x PP x CP that fits in memory.

        Full recompute counts like twice the size. If no candidate fits, return the row of the one that needs the least
        memory. Candidates whose TP groups and expert groups are each inside a node, then those with at most LONG_TOKENS
        per CP rank, and then those with an even split, come first. Ties prefer, in this order: no recompute, a smaller
        CP and EP, no distributed optimizer, TP over PP, and sequence parallelism.
        """
        missing_bytes = np.where(predictions.fits, 0.0, predictions.device_used_bytes)
        size = columns[TP] * columns[PP] * columns[CP] * (1 + columns[RECOMPUTE])
        ties = [columns[name] for name in (RECOMPUTE, CP, EP, DIST_OPT, PP)]
        crosses = np.maximum(columns[TP], columns[EP]) > task.cluster.linked_devices
        tokens = np.maximum(task.spec.train.seq_length / columns[CP], production.LONG_TOKENS)
        keys = (missing_bytes, crosses, tokens, columns[SPLIT], size, *ties, -columns[SP])
        return int(np.lexsort(keys[::-1])[0])

    # Predictions

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        return prediction.predict(task, columns, costs)

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        return prediction.sizes(task, columns)

    def published(self, task: Task, values: Mapping[str, KnobValue], notes: str) -> Published:
        found, completed, noted = production.published(task, values, notes)
        return Published(
            found, completed, noted, checks.job_warnings(found, completed, task.spec.train.settings, noted)
        )

    # Trials

    def ready(self, spec: Spec) -> None:
        start.ready(spec)

    def trial_notes(self, platform: Platform, candidate: Candidate | None) -> Sequence[str]:
        changes = checks.command_changes(platform, candidate) if candidate else []
        return [*changes, *start.installation_notes(platform)]

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        return start.launch(platform, candidate, folder, for_real=for_real)

    def steps(self, task: Task, folder: str) -> Steps:
        return reading.steps(task, folder)

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        return reading.read(task, candidate, folder, partial=partial)

    def answers(self, task: Task, change: str, folder: str, baseline: str) -> Answers | None:
        return compared(task, change, reading.record(task, folder), reading.record(task, baseline))

    def shorter_batch(self, task: Task, candidate: Candidate, share: float) -> int | None:
        return start.shorter_batch(task, candidate, share)


MEMORY_ORDER = {knob.name: knob.memory_order for knob in SPACE_KNOBS if knob.memory_order}
"""How the values of each knob are ordered by memory. The knobs of recompute are not included."""


def _ordered_at_least(columns: Columns, other: Columns, order: Mapping[str, int]) -> BoolArray:
    plain = [knob.name for knob in SPACE_KNOBS if knob.name not in order and knob.name not in meshes.RECOMPUTE_KNOBS]
    equal = [columns[knob] == other[knob] for knob in plain]
    above = [(columns[knob] - other[knob]) * sign >= 0 for knob, sign in order.items()]
    result: BoolArray = np.logical_and.reduce([*equal, *above])
    return result & (columns[meshes.MESHES] == 0) if meshes.MESHES in columns else result


def _recomputes_at_most(less: Columns, more: Columns) -> BoolArray:
    """Return a mask of the candidates for which the columns `less` recompute at most as much as the columns `more`.

    They then recompute nothing, the same, or at most as many layers by block recompute.

    Selective and full recompute have no order: full recompute of some layers keeps the attention scores of the others.
    """
    low, high = _recompute_level(less), _recompute_level(more)
    same_method = less["recompute_method"] == more["recompute_method"]
    layers, others = less["recompute_num_layers"], more["recompute_num_layers"]
    block = (less["recompute_method"] == BLOCK) & (layers <= others)
    same: BoolArray = same_method & ((layers == others) | block)
    result: BoolArray = (low == 0) | ((low == high) & same)
    return result


def _recompute_level(columns: Columns) -> IntArray:
    """Return a code for each candidate: 0 for no recompute, 1 for selective and 2 for full recompute."""
    return columns["use_recompute"] * columns["recompute_granularity"]


ENGINE = Megatron()
