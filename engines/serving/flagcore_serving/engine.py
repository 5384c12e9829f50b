"""Serving engines as the core knows them.

Job records of published runs omit some settings. They are filled in as follows:

- The KV cache has 8-bit elements if the chip computes in 4 bits and the weights have fewer than 16 bits: recipes for
  such chips use such a cache, and the numbers of requests in published points confirm it. Otherwise it has 16 bits.
- If the weights take more than 80% of a device's memory, the engine may use 95% of that memory.
- A missing release, or a commit instead of a release, is replaced with `PublishedRuns.release`, which dates from the
  time of the measurements.
- Experts on several hosts have the copies, load balancer, chunks and overlap of published recipes, unless the record
  has one of these or an exchange, and the exchange of published runs, unless it has one.
- Lengths that only the client of InferenceX or of an engine's own pages has are drawn from the range of that client.
- Other settings come from the engine's `PublishedRuns`, flags only with the lengths of InferenceX, then from its
  defaults.
"""

import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_models.public import find_public

from flagcore.contracts import Costs, Engine, Platform, PruningRule
from flagcore.contracts.capabilities import (
    Advice,
    Commands,
    JobRecords,
    Production,
    Pruning,
    RuleOfThumb,
    Servers,
    Sizes,
    Steps,
)
from flagcore.domain.engine import Unmodelled
from flagcore.domain.knob import unknown_release
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.metrics import MIN_REQUESTS, RATES
from flagcore.domain.model import Model
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue
from flagcore.domain.spec import AUTO, SettingValue, Spec, Task
from flagcore.domain.trial import Measurement, Trial
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import Message, _
from flagcore.launchers.programs import release
from flagcore.spec.models import model_from
from flagcore_serving.launch import importing
from flagcore_serving.launch.start import EngineProfile
from flagcore_serving.load.figures import SteadyState
from flagcore_serving.load.traffic import in_flight, traffic
from flagcore_serving.model.predict import predict
from flagcore_serving.model.simulated_load import STEADY_RATIO, WAVES_IN_FLIGHT
from flagcore_serving.model.speculation import USUAL
from flagcore_serving.model.work import HOST_RATE, Overheads, overheads_of
from flagcore_serving.space import knobs as common_knobs
from flagcore_serving.space import placement, rules
from flagcore_serving.space.adapters import CONFIG, DEFAULT_RANK, check_adapters, rank_of
from flagcore_serving.space.adapters import SWITCH as ADAPTER_SWITCH
from flagcore_serving.space.hardware import DP, EP, INSTANCES, PP, PREFILL_DECODE, TP, Hardware, count
from flagcore_serving.space.knobs import CONTEXT, LAYOUT
from flagcore_serving.space.program import Program
from flagcore_serving.space.weights import (
    WIDE_PRECISIONS,
    check_formats,
    has_unknown_format,
    is_quantized,
    min_devices,
    quantizes,
    weight_bytes,
)
from flagcore_serving.trial import reading
from flagcore_serving.trial.failures import PATTERNS
from flagcore_serving.trial.reading import with_measured_acceptance

WIDE_RECIPE = (common_knobs.EXCHANGE, common_knobs.OVERLAP, common_knobs.REDUNDANT, common_knobs.BALANCING)
"""Knobs that describe how experts on several hosts are served. A record with one of them has its own recipe."""
EXCHANGES = (common_knobs.EXCHANGE, common_knobs.PREFILL_EXCHANGE)


@dataclass(kw_only=True, eq=False)
class ServingEngine(
    EngineProfile, Engine, Advice, Commands, JobRecords, Production, Pruning, RuleOfThumb, Servers, Sizes, Steps
):
    """A serving engine as the core's `Engine`. All engines share this class and differ in their `EngineProfile`."""

    kind: str = "serve"
    targets: Collection[str] = ("compose",)
    per_server: bool = False
    starts = importing.starts
    role = importing.role
    read_command = importing.spec_of_command
    check_values = staticmethod(check_formats)

    def defaults(self, task: Task) -> dict[str, KnobValue]:
        """Return the knob values of a candidate that sets no knob itself.

        Knobs have the values that `engine_args` fix, or else their neutral values. The default of the knob `split_by`
        is the minimum number of devices that hold the weights.
        """
        neutral = {knob.name: knob.neutral for knob in self.knobs}
        return neutral | {self.split_by: min_devices(task)} | self.program.parse(task.spec).fixed

    def device_counts(self, task: Task, columns: Columns) -> IntArray:
        """Return the number of devices of each candidate, summed over its instances."""
        kinds = placement.instance_kinds(task, columns)
        return kinds.total(self.settings(task, kinds.columns).devices).astype(np.int64)

    def overheads_for(
        self, task: Task, *, on_host: bool = False, on_chip: Mapping[str, Any] | None = None
    ) -> Overheads:
        """Return the engine's overheads for a task.

        `on_host`: whether the CPU that schedules also computes. Small kernels then have no launch overhead. `on_chip`:
        overheads that differ on the chip. Raises SpecError for an unknown name of these.
        """
        serve = task.spec.serve
        on_chip = on_chip or {}
        if unknown := sorted(on_chip.keys() - {each.name for each in fields(Overheads)}):
            problem = f"is not an overhead of {self.program.title}"
            raise SpecError(file="quirks.yaml", key=f"overheads.values.{unknown[0]}", problem=problem)
        overheads = replace(overheads_of(self.program.overheads, serve.engine_version), **on_chip)
        if on_host:
            overheads = replace(overheads, attention=0.0, latent=0.0, ffn=0.0, experts={})
            if self.host_times is not None:
                iteration, sequence = self.host_times
                overheads = replace(overheads, iteration=iteration, sequence=sequence, request=3e-3, entry=0.5e-3)
        receive = serve.engine_args.get(self.receive_flag)
        return replace(overheads, receive=receive) if isinstance(receive, int) and receive > 0 else overheads

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        kinds = placement.instance_kinds(task, columns)
        return predict(
            task,
            self.settings(task, kinds.columns),
            costs,
            self.overheads_for(task, on_host=costs.synchronous, on_chip=costs.overheads),
            untested=bool(self.untested),
            kinds=kinds,
            draft=self.draft(task.spec),
        )

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return the base-2 logarithms of each candidate's instance count, TP size and limits on an iteration.

        The TP size and the limits on sequences and tokens are those of the candidate's first kind of instance.
        """
        kinds = placement.instance_kinds(task, columns)
        settings, rows = self.settings(task, kinds.columns), kinds.first_rows
        figures = {
            "instances": settings.instances,
            "tensor_model_parallel_size": settings.tensor,
            "max_running": settings.max_running,
            "max_batched_tokens": settings.max_batched_tokens,
        }
        return {name: np.log2(np.maximum(values[rows], 1).astype(np.float64)) for name, values in figures.items()}

    def load_seconds(self, task: Task, predictions: Predictions) -> FloatArray:
        """Return the predicted seconds of all loads and repeats of each candidate, or NaN for `ServeSpec.highest`.

        The metrics are those of one load point. Answers of points with fewer clients are assumed to take as long.
        """
        serve, asked, figures = task.spec.serve, (*task.spec.work.slo, task.spec.objective), predictions.figures
        seconds = np.full(predictions.step_time_s.shape, np.nan if serve.highest else 0.0)
        for load in map(in_flight, serve.loads):
            requests = load.num_prompts or SteadyState(asked, load.concurrency).enough
            slots_rate = (load.concurrency or math.inf) / figures["e2e_s.mean"]
            seconds += serve.repeats * requests / np.minimum(figures["requests_per_s"], slots_rate)
        return seconds

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        return (SloImpossible(task.spec.work.slo),) if task.spec.work.slo else ()

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return the rows of `columns` that are certain to need at least as much memory as `candidate`, as a mask.

        A knob that `candidate` does not set, or whose effect on memory is unknown, must have the same value in the row.
        """
        values, orders = candidate.as_dict(), {knob.name: knob.memory_order for knob in self.knobs}
        result = np.ones(next(iter(columns.values())).size, dtype=np.bool_)
        for name, column in columns.items():
            value, order = values.get(name), orders.get(name, 0)
            if isinstance(value, str):  # its code is not known here, so no row is certain
                return np.zeros_like(result)
            code = 0 if value is None else int(value)
            if order > 0 and code > 0:
                result &= column >= code
            elif order < 0:
                result &= column <= code
            else:
                result &= column == code
        return result

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        return super().columns(task, {**self.defaults(task), **self.parse(values)})

    def _columns_of(self, task: Task, candidate: Candidate) -> dict[str, IntArray]:
        """Encode a candidate as one-row columns, without the knobs of plugins."""
        engine_knobs = {axis.knob for axis in self.axes(task)}
        return self.columns(task, {knob: value for knob, value in candidate.items if knob in engine_knobs})

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return the task and the knob values of a job record, with omitted settings filled in (see the module)."""
        serve, chip, runs = task.spec.serve, task.cluster.groups[0].chip, self.published_runs
        parsed = self.parse(values)
        if runs.cache_type and serve.precision not in WIDE_PRECISIONS and "fp4" in chip.dense_flops_per_second:
            parsed.setdefault(common_knobs.KV, runs.cache_type)
        if runs.release and release(serve.engine_version or "") is None:
            serve = replace(serve, engine_version=runs.release)
        load = serve.loads[0]
        lengths, drawn = (load.input_len, load.output_len), runs.drawn if load.num_prompts else {}
        if lengths in INFERENCEX and load.num_prompts in (None, WAVES_IN_FLIGHT * (load.concurrency or 0)):
            serve = replace(serve, engine_args={**runs.engine_args, **serve.engine_args})
            drawn = {lengths: STEADY_RATIO}
        if load.range_ratio == 1.0 and load.concurrency:
            serve = replace(serve, loads=(replace(load, range_ratio=drawn.get(lengths, 1.0)),))
        assumed = self._as_in_production(task, parsed)
        if (
            GENERATOR in notes
            and lengths not in INFERENCEX
            and not parsed.get(PREFILL_DECODE)
            and count(parsed, PP) == 1
        ):
            known = release(serve.engine_version or "") or ()
            written = {
                name: value for name, (since, value) in runs.generated.items() if known >= (release(since) or ())
            }
            assumed |= {name: value for name, value in written.items() if name not in parsed}
        parsed |= assumed
        noted = frozenset(assumed)
        if UNASKED in notes and (first := task.cluster.groups[0]).cpus_per_node is None:
            groups = (replace(first, cpus_per_node=UNASKED_CPUS), *task.cluster.groups[1:])
            task, noted = replace(task, cluster=replace(task.cluster, groups=groups)), noted | {CPUS}
        if runs.memory_flag and _weights_share(task, parsed) > CROWDED_SHARE:
            serve = replace(serve, engine_args={runs.memory_flag: RAISED_SHARE, **serve.engine_args})
        # The space must contain the value of PREFILL_DECODE, which is possibly not among those of `auto`.
        kinds = parsed.get(PREFILL_DECODE)
        space = {**task.spec.space, PREFILL_DECODE: (kinds,)} if kinds else {**task.spec.space}
        space |= {name: (parsed[name],) for name in EXCHANGES if parsed.get(name) is not None}
        return replace(task, spec=replace(task.spec, work=serve, space=space)), parsed, noted

    def _as_in_production(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
        """Return the values that published recipes set if experts are on several hosts, unless `values` or
        `engine_args` have one of them: copies of experts, placed by a load balancer, large chunks of prompts and, if
        links end at the host, two-batch overlap. Copies are the fewest with which all ranks hold equally many."""
        runs, experts, group = self.published_runs, task.spec.model.num_moe_experts, task.cluster.groups[0]
        pair, fixed = values.get(PREFILL_DECODE), self.program.parse(task.spec).fixed
        layouts = [each.layout for each in placement.language(placement.roles(str(pair)))] if pair else [{}]
        sizes = [{name: int(each.get(name, values.get(name)) or 1) for name in (TP, DP, EP)} for each in layouts]
        wide = [each for each in sizes if each[EP] > 1 and each[DP] > 1]
        ranks = [each[TP] * each[DP] for each in wide]
        recipe = {*WIDE_RECIPE, runs.wide_chunk[0]}
        if not (runs.wide_copies and experts and max(ranks, default=1) > group.devices_per_node):
            return {}
        if any(values.get(name) is not None for name in recipe) or recipe & fixed.keys():
            return {}
        copies = next(
            number
            for number in itertools.count(runs.wide_copies)
            if not any((experts + number) % each[EP] for each in wide)
        )
        chunk = {runs.wide_chunk[0]: runs.wide_chunk[1] * sizes[0][TP] * sizes[0][DP]}
        overlap = {common_knobs.OVERLAP: True} if group.link_domain <= group.devices_per_node else {}
        return {common_knobs.REDUNDANT: copies, common_knobs.BALANCING: True, **chunk, **overlap}

    def job_warnings(
        self, task: Task, values: Mapping[str, KnobValue], settings: Mapping[str, SettingValue], noted: Collection[str]
    ) -> Sequence[str]:
        """Return warnings that name the assumed values: those of commands that GENERATOR wrote, and of the recipes of
        experts on several hosts."""
        words = {knob.name: knob.words for knob in self.knobs}
        found = {name: values[name] for name in noted if name in values}
        written = {name: found.pop(name) for name in self.published_runs.generated if name in found}
        lines = [f"{name} = {json.dumps(value)} is assumed, as {GENERATOR} sets it" for name, value in written.items()]
        if CPUS in noted:
            lines.append(f"{CPUS} = {UNASKED_CPUS} is assumed: the job of {UNASKED} asks for no CPUs")
        for merge in rules.exchange_merge(task, self.program):
            codes = merge.canonical(self.columns(task, values))
            found |= {name: words[name][code[0] - 1] for name, code in codes.items() if code[0]}
        assumed = ", ".join(f"{name} = {json.dumps(found[name])}" for name in sorted(found))
        return (
            *lines,
            *([f"experts on several hosts are assumed as in published recipes: {assumed}"] if assumed else ()),
        )

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return a space of the layouts that an expert would consider, with the engine's defaults for all other knobs.

        The layouts come from the spec's space. Without a space, they are all layouts that do not split a matrix over
        several nodes. On CPU cores the engine's defaults are the only choice: one instance that uses all cores.
        """
        space, node = task.spec.space, max(group.devices_per_node for group in task.cluster.groups)
        fixed, by_default = self.program.parse(task.spec).fixed, task.spec.serve.default_space
        usual: dict[str, str | tuple[KnobValue, ...]] = {name: (value,) for name, value in self.defaults(task).items()}
        if by_default and CONTEXT in usual and CONTEXT not in fixed:
            usual[CONTEXT] = AUTO
        if Hardware.of(task).on_cores:
            return usual
        for knob in (knob for knob in self.knobs if knob.name in LAYOUT and knob.name not in fixed):
            searched = knob.value_in(space)
            if searched is not None:
                usual[knob.name] = searched
            elif by_default:
                in_node = tuple(size for size in common_knobs.tensor_sizes(task) if size <= node)
                usual[knob.name] = in_node if knob.name == TP else AUTO
        return usual

    def rule_of_thumb(self, task: Task, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the candidate that an expert would choose.

        The criteria are, in this order: the most devices in use, enough memory for the cache (CACHE_SHARE), the fewest
        attention DP groups, the fewest expert groups, no split other than by the knob `split_by`, and the smallest such
        split.
        """
        one = np.ones_like(predictions.worst_stage)
        sizes = {knob: np.maximum(columns.get(knob, one), 1) for knob in LAYOUT}
        used = sizes[INSTANCES] * sizes[TP] * sizes[PP] * sizes[DP]
        crowded = ~(predictions.figures["kv_cache_bytes"] >= CACHE_SHARE * predictions.device_used_bytes)
        other = sizes[PP if self.split_by == TP else TP]
        return int(np.lexsort((sizes[self.split_by], other, sizes[EP], sizes[DP], crowded, -used))[0])

    def unusual(self, task: Task, columns: Columns, predictions: Predictions) -> IntArray:
        """Return the number of unusual properties of each candidate.

        These are more pipeline stages than nodes that the weights need, unless the engine splits by stages, and a mean
        TTFT of more than half of the time of a request. Such stages count as `DEEP` properties.
        """
        kinds, figures = placement.instance_kinds(task, columns), predictions.figures
        needed = max(1, min_devices(task) // task.cluster.linked_devices)
        is_deep = (self.split_by != PP) & (self.settings(task, kinds.columns).pipeline > needed)
        is_late = figures["ttft_s.mean"] > 0.5 * figures["e2e_s.mean"]
        return DEEP * (kinds.total(np.where(is_deep, 1.0, 0.0)) > 0).astype(np.int64) + is_late

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice if servers of `spec` cannot be started from this machine."""
        serve, cluster = spec.serve, spec.cluster
        if cluster.groups:
            chips = [group.chip for group in cluster.groups]
            problem = "are several kinds of chips, but one machine has only one kind"
            fix = "predict with `flag estimate`"
            raise SpecError(key="cluster.groups", value=chips, problem=problem, fix=fix)
        if cluster.nodes > 1 and not spec.on_each_host:
            problem = "is more than one, but no launcher for several hosts is set"
            fix = "set auto_tuner.launcher and cluster.hostfile, or predict with `flag estimate`"
            raise SpecError(key="cluster.nodes", value=cluster.nodes, problem=problem, fix=fix)
        for load in serve.loads:
            traffic(in_flight(replace(load, num_prompts=1) if load.is_steady else load))
        if serve.directory is not None and not Path(serve.directory).is_dir():
            problem, fix = "is not a folder, but serve.command starts there", "use an existing folder, or remove it"
            raise SpecError(key="serve.directory", value=serve.directory, problem=problem, fix=fix)
        check_adapters(serve)
        if spec.objective == "goodput_requests_per_s" and not spec.work.slo:
            problem, fix = "needs an SLO: it counts the requests that meet it", "set serve.slo"
            raise SpecError(key="auto_tuner.objective", value=spec.objective, problem=problem, fix=fix)
        self.program.ready(spec)

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        predicted = {} if for_real else self._predicted(platform, candidate)
        return self.started(platform, candidate, folder, predicted, for_real=for_real)

    def _predicted(self, platform: Platform, candidate: Candidate) -> Mapping[str, float]:
        """Return the predicted metrics of a candidate by name, without NaN and infinite values."""
        columns = self._columns_of(platform.task, candidate)
        figures = self.predict(platform.task, columns, platform.costs).row(0).figures
        return {name: float(value) for name, value in figures.items() if math.isfinite(value)}

    def replica(self, candidate: Candidate) -> tuple[Candidate, int]:
        values = candidate.as_dict()
        if (pair := values.get(PREFILL_DECODE)) is not None:
            raise UsageError(f"{PREFILL_DECODE} = {pair}: this target only starts identical servers")
        return Candidate.of({**values, INSTANCES: 1}), count(values, INSTANCES)

    def unmodelled(self, task: Task) -> tuple[Unmodelled, ...]:
        drafts = {f"serve.engine_args.{self.program.draft_flag}"} if self._knows_draft(task.spec) else set[str]()
        found = tuple(each for each in self.program.unmodelled(task.spec) if each.name not in drafts)
        if task.cluster.groups[0].chip.host_bytes_per_second or not self.program.offloaded_bytes(task.spec):
            return found
        why = f"the rate of the link of this chip's host is not known, and {HOST_RATE / 1e9:g} GB/s are assumed"
        return (*found, Unmodelled(name=f"serve.engine_args.{self.program.offload_flag}", why=why, time=(0.4, 1.3)))

    def task_warnings(self, task: Task) -> tuple[str, ...]:
        """Return a note on the exchange that candidates with experts on several hosts have, if the spec sets none."""
        if not rules.exchange_merge(task, self.program):
            return ()
        values = {axis.knob: axis.values for axis in self.axes(task)}
        pairs = [placement.roles(str(word)) for word in values[PREFILL_DECODE] if word]
        sizes = [*(int(size or 1) for size in values[EP]), *(each.ep for pair in pairs for each in pair)]
        if max(sizes) <= Hardware.of(task).per_host:
            return ()
        words = self.program.exchanges[task.cluster.groups[0].chip.vendor] or ()
        names = {"knob": common_knobs.EXCHANGE, "words": ", ".join(dict.fromkeys(words))}
        return (_("candidates with experts on several hosts have {knob} = {words}, as in published runs", **names),)

    def draft(self, spec: Spec) -> Model | None:
        """Return the other model that drafts tokens: that of a folder, or a public one. None if it is unknown."""
        name = self.program.split(spec).others.get(self.program.draft_flag)
        if not isinstance(name, str):
            return None
        try:
            return model_from(name, base=Path())
        except SpecError:
            return None

    def _knows_draft(self, spec: Spec) -> bool:
        """Return whether all candidates that speculate draft with a head, or with another model that is known."""
        schemes = {self.program.schemes_of(spec).get(each, "") for each in speculations(spec, self.program)}
        return bool(schemes) and not schemes & {"", *(["draft_model"] if self.draft(spec) is None else [])}

    def spec_warnings(self, spec: Spec) -> tuple[str, ...]:
        return tuple(_spec_warnings(spec, self.program))

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        kinds = placement.instance_kinds(task, self._columns_of(task, candidate))
        instance_devices = np.repeat(self.settings(task, kinds.columns).devices, kinds.count)
        return reading.read(task, candidate, folder, instance_devices.tolist())

    def learned(self, task: Task, trials: Sequence[Trial]) -> Task:
        return with_measured_acceptance(task, trials, self.program.schemes_of(task.spec))

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return the failure patterns for the output of the trial program, which itself reads the engine's log."""
        return PATTERNS


INFERENCEX = ((1024, 1024), (1024, 8192), (8192, 1024))
"""Lengths of InferenceX's prompts and answers. Its client draws them from a range, and its recipes set flags. It sends
`WAVES_IN_FLIGHT` requests per client."""
GENERATOR = "aiconfigurator"
"""The source of records of servers whose commands this generator of NVIDIA wrote."""
UNASKED, UNASKED_CPUS, CPUS = "InferenceX experimental", 2, "cluster.cpus_per_node"
"""The source of records of a Slurm job that asks for devices, but for no CPUs (SemiAnalysisAI/InferenceX
`experimental/token_position_decode_slo`), and what it gets by default: one core, with two hardware threads."""
CROWDED_SHARE, RAISED_SHARE = 0.8, 0.95
"""Published runs raise the engine's memory share to `RAISED_SHARE` if the weights take more than `CROWDED_SHARE` of a
device's memory."""
CACHE_SHARE = 0.25
"""Minimum share of the used memory that an expert reserves for the cache. To get it, an instance gets more devices."""


def _weights_share(task: Task, values: Mapping[str, KnobValue]) -> float:
    if pair := values.get(PREFILL_DECODE):
        devices = min(each.devices for each in placement.language(placement.roles(str(pair))))
    else:
        devices = math.prod(count(values, knob) for knob in (TP, PP, DP))
    return weight_bytes(task) / devices / Hardware.of(task).memory_bytes


DEEP = 5
"""Unusual properties of a pipeline on devices that need none: together about the median error of predictions, which are
too fast for pipelines in most published pairs (benchmarks/LOG.md)."""

CERTAIN_SHARE = 0.4
"""A limit below this share of the prediction is certain to be missed: only 1.3% of 152 published times to the first
token were below 0.49 of the prediction."""


class SloImpossible:
    """Prunes candidates whose predictions miss an SLO limit by far.

    A candidate is pruned if even an optimistic value of a metric exceeds the limit. On a logarithmic scale, this value
    is twice as far below the prediction as the lower end of the 80% interval. It is at most `CERTAIN_SHARE` of the
    prediction.
    """

    name = "slo_impossible"

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._limits = limits
        bounds = ", ".join(f"{name} <= {limit:g} s" for name, limit in limits.items())
        self.message: str = Message("the prediction misses the SLO by far ({bounds})", bounds=bounds)

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        """Return a mask of the rows that cannot meet a limit. Rows with an unknown metric or interval are kept."""
        lower_share = np.minimum((predictions.low_s / predictions.step_time_s) ** 2, CERTAIN_SHARE)
        is_pruned = np.zeros(predictions.step_time_s.shape, dtype=np.bool_)
        for name, limit in self._limits.items():
            if name in predictions.figures:
                is_pruned |= predictions.figures[name] * lower_share > limit
        return is_pruned


FIXED_RATES = RATES[:3]
"""Rates that the arrivals of requests determine as long as the servers keep up."""

LONG_LIMITS = {"ttft_s": 100.0, "tpot_s": 5.0, "itl_s": 5.0}
"""Limits of at least this many seconds cause a warning. `e2e_s` has no such bound: a whole answer may take long."""


def speculations(spec: Spec, program: Program) -> list[str]:
    """Return the methods of speculation that a spec fixes or searches."""
    name, fixed = common_knobs.SPECULATION, program.parse(spec).fixed
    given = fixed.get(name, spec.space.get(name)), (spec.baseline or {}).get(name)
    words = [word for each in given for word in (each if isinstance(each, tuple) else (each,))]
    return [*dict.fromkeys(str(word) for word in words if word not in (None, "none", AUTO))]


def _spec_warnings(spec: Spec, program: Program) -> Iterator[str]:
    """Yield a one-line warning for each doubtful setting of a spec.

    Doubtful settings are an unknown release, unknown flags, limits that look like milliseconds, too few requests, an
    objective that the load determines, speculation with unknown acceptance, and adapters or weights that are missing or
    of another format.
    """
    serve = spec.serve
    yield from unknown_release("serve.engine_version", serve.engine, serve.engine_version, program.releases)
    flags = program.flags_of(spec)
    for name in program.split(spec).others:
        key = f"serve.engine_args.{name}"
        if found := program.flag_problem(name, flags, program.version(spec)):
            release = ", or set serve.engine_version to your release" if found.removed else ""
            yield f"{key} {found.problem}; {found.fix}{release}"
    fixed = program.parse(spec).fixed
    for name in program.moved:
        for value in (fixed.get(name), *spec.space.get(name, ()), (spec.baseline or {}).get(name)):
            if text := program.needed_package(name, value, program.version(spec)):
                yield f"{name}: {text}"
    for name, limit in serve.slo.items():
        if limit >= LONG_LIMITS.get(name.partition(".")[0], math.inf):
            yield f"serve.slo.{name}: {limit:g} s is a very long limit; limits are in seconds: 200 ms is 0.2"
    fewest = min((load.num_prompts for load in serve.loads if load.num_prompts is not None), default=math.inf)
    min_requests = {name: MIN_REQUESTS.get(name.rpartition(".")[2], 0) for name in serve.slo}
    name = max(min_requests, key=lambda each: min_requests[each], default="")
    if fewest < min_requests.get(name, 0):
        yield f"serve.slo.{name}: {fewest} requests are too few; use serve.profile.num_prompts >= {min_requests[name]}"
    is_open = all(in_flight(load).concurrency is None and load.request_rate != math.inf for load in serve.loads)
    if is_open and serve.highest is None and spec.objective in FIXED_RATES:
        fix = (
            "set auto_tuner.objective to a latency such as tpot_s.p99, or serve.profile.request_rate: auto with an SLO"
        )
        yield f"the load determines {spec.objective}: candidates differ only if they cannot keep up; {fix}"
    for folder in serve.adapters:
        if not rank_of(folder):
            yield f"serve.adapters: {folder} has no {CONFIG} with a rank r; predictions assume r = {DEFAULT_RANK}"
    if ADAPTER_SWITCH in program.split(spec).others and not serve.loads[0].adapters:
        yield "serve.profile.adapters is 0: all requests are predicted to use the base model; set it"
    for word in speculations(spec, program):
        scheme = program.schemes_of(spec).get(word, "")
        if all(load.accepted(scheme) for load in serve.loads):
            continue
        text, fix = f"{common_knobs.SPECULATION} = {word}", "set serve.profile.acceptance"
        if scheme in USUAL:
            yield f"{text} is predicted with a usual acceptance of {USUAL[scheme]} before its first trial; {fix}"
        else:
            why = "how often drafts are right depends on the traffic"
            yield f"{text} is predicted without a gain before its first trial: {why}; {fix}"
    weights, precision = serve.weights, serve.precision
    if weights is None:
        return
    if not serve.elsewhere and not find_public(weights) and not Path(weights).exists():
        size = f"predictions compute their size from the model and serve.precision = {precision}"
        yield f"serve.weights: {weights} does not exist here; {size}"
    elif precision in WIDE_PRECISIONS and has_unknown_format(weights):
        text = f"the format of the quantized weights is unknown, so predictions assume {precision}; set it"
        yield f"serve.precision: {text}"
    elif not (precision in WIDE_PRECISIONS or is_quantized(weights) or quantizes(spec)):
        fix = f"set the weights to a checkpoint in {precision}, or serve.engine_args: {{quantization: ...}}"
        yield f"serve.precision: predictions assume {precision}, but {weights} is not quantized; {fix}"
