"""Megatron as a workload: what the core asks of an engine, put together from the files beside this one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from flagcore.contracts import Costs, Platform, PruningRule, Workload
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.prediction import Components, ModelPart, Passes, Predictions, RankPrediction
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Merge, Rule
from flagcore.domain.spec import AUTO, SettingValue, Spec, Task
from flagcore.domain.trial import Measurement, TrialState
from flagcore.engines.megatron import (
    dominance,
    knobs,
    launching,
    options,
    parts,
    predict,
    probing,
    published,
    reading,
    rules,
    setting_rules,
    unused_keys,
)
from flagcore.engines.megatron.recompute import recompute_modules


class UselessSelectiveRecompute:
    """Selective recompute drops the attention core, which flash attention recomputes by itself."""

    name = "selective_recompute_with_flash_attention"
    message = "flash attention keeps no attention core, so recomputing it costs time and saves nothing"

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        """Return True where recompute is selective."""
        selective: BoolArray = columns["recompute_granularity"] == knobs.SELECTIVE
        return selective


class Megatron:
    """Training with megatron-core, or with a user's own Megatron-LM command."""

    name = "megatron"
    kind = "train"
    knobs: tuple[Knob, ...] = knobs.KNOBS
    modules: Mapping[str, str] = {"torch": "torch", "megatron.core": "megatron-core>=0.16,<0.17"}

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the thirteen knobs."""
        return knobs.axes(task)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return what Megatron refuses."""
        return (*rules.rules(task), *setting_rules.setting_rules(task))

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return what is the same to Megatron."""
        return rules.merges(task)

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return memory and time for whole columns."""
        return predict.predict(task, columns, costs)

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return parameters and bytes by component for one stage of each row."""
        return predict.components(task, columns, stages, costs)

    def rank(self, task: Task, columns: Columns, rank: int, costs: Costs) -> RankPrediction:
        """Return the figures of one rank of one candidate."""
        return predict.rank_figures(task, columns, rank, costs)

    def passes(self, task: Task, columns: Columns, costs: Costs) -> Passes | None:
        """Return the passes of one candidate's pipeline."""
        return predict.passes(task, columns, costs)

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return the sizes of a device's matrix products, as logarithms to base 2."""
        return predict.sizes(task, columns)

    def spec_warnings(self, spec: Spec) -> list[str]:
        return unused_keys.unused_in_space(spec.train.settings, spec.space)

    def job_warnings(
        self,
        task: Task,
        values: Mapping[str, KnobValue],
        settings: Mapping[str, SettingValue],
        noted: Collection[str],
    ) -> list[str]:
        assumed = unused_keys.assumed_in_job({*settings, *noted}, task.spec.train.settings)
        return [*unused_keys.unused_in_job(settings, values), *assumed]

    def parts(self, task: Task) -> tuple[ModelPart, ...]:
        """Return the weights of the model by its parts."""
        return parts.model_parts(task)

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        """Return what is legal but never worth a trial."""
        only_core = recompute_modules(options.settings_in_force(task.spec.train)) == {"core_attn"}
        return (UselessSelectiveRecompute(),) if task.spec.train.attention == "flash" and only_core else ()

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows need at least as much memory as `candidate`."""
        return dominance.needs_at_least(columns, candidate)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows do the work of `candidate` and more."""
        return dominance.takes_at_least(columns, candidate)

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Return columns of one row; a data-parallel size that is not given is what the devices leave."""
        columns = knobs.candidate_columns(values)
        if values.get(rules.DP) is None:
            used = columns[rules.TP] * columns[rules.PP] * columns[rules.CP]
            columns[rules.DP] = np.maximum(task.cluster.devices // used, 1)
        if values.get(rules.RECOMPUTE) is None:
            columns[rules.RECOMPUTE] = (columns[rules.GRANULARITY] > 0).astype(np.int64)
        return columns

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return a job record's task and knobs with what it leaves out, and the settings that its notes tell of."""
        return published.published(task, values, notes)

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return TP x PP x DP (and EP) with micro batch 1, with and without distributed optimizer and recompute."""
        neutral: dict[str, tuple[KnobValue, ...]] = {knob.name: (knob.neutral,) for knob in knobs.SPACE_KNOBS}
        auto = (rules.DP, rules.TP, rules.PP, rules.EP, rules.SP, rules.DIST_OPT, rules.RECOMPUTE)
        full: dict[str, tuple[KnobValue, ...]] = {
            rules.GRANULARITY: ("full",),
            rules.METHOD: ("uniform",),
            rules.RECOMPUTE_LAYERS: (1,),
        }
        return {**neutral, **dict.fromkeys(auto, AUTO), **full}

    def rule_of_thumb(self, columns: Columns, predictions: Predictions) -> int:
        """Return the smallest TP x PP that fits, DP for the rest; if none fits, the row that needs least memory.

        Ties go, in this order, to no recompute, the smaller EP, the plain optimizer, TP before PP, and
        sequence parallelism where there is TP.
        """
        need = np.where(predictions.fits, 0.0, predictions.device_used_bytes)
        width = columns[rules.TP] * columns[rules.PP]
        keys = (
            need,
            width,
            columns[rules.RECOMPUTE],
            columns[rules.EP],
            columns[rules.DIST_OPT],
            columns[rules.PP],
            -columns[rules.SP],
        )
        return int(np.lexsort(keys[::-1])[0])

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice unless trials of `spec` can run here."""
        launching.ready(spec, self.modules)

    def ready_to_probe(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice unless probes of `spec` can run here."""
        launching.ready_to_probe(spec, self.modules)

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Return how to start a candidate."""
        return launching.launch(platform, candidate, folder, for_real=for_real)

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that tells the seconds of the steps that a running trial has finished."""
        if task.spec.train.command is not None:
            return reading.CommandProgress(folder)
        return partial(reading.program_progress, folder)

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return what a trial measured. Raises NoMetrics with what is missing."""
        if task.spec.train.command is not None:
            return reading.read_command(task, candidate, folder)
        return reading.read_program(task, folder, partial=partial)

    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the ranks that tell most of a candidate."""
        return probing.probe_ranks(task, self.columns(task, candidate.as_dict()), costs)

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Return how to start the probe of one rank on one device."""
        return probing.probe_launch(platform, candidate, rank, folder, device)

    def read_probe(self, task: Task, folder: str) -> RankMeasurement:
        """Return what a probe measured. Raises NoMetrics with what is missing."""
        return probing.read_probe(task, folder)

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return what the trial program and Megatron say when they fail."""
        return (
            FailurePattern(pattern=r"^out of memory:", state=TrialState.OUT_OF_MEMORY),
            FailurePattern(pattern=r"OutOfMemoryError|can't allocate memory", state=TrialState.OUT_OF_MEMORY),
            FailurePattern(pattern=r"^invalid configuration:", state=TrialState.INVALID),
            FailurePattern(pattern=r"Watchdog caught collective operation timeout", state=TrialState.TIMED_OUT),
            FailurePattern(pattern=r"^(\[rank\d+\]: )?(AssertionError|ValueError)\b", state=TrialState.INVALID),
        )


WORKLOAD: Workload = Megatron()
