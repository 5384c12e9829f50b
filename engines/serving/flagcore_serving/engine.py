"""Serving engines as the core knows them."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_models.layers import latent_layers

from flagcore.contracts import Commands, Costs, Plans, Platform, PruningRule, Published
from flagcore.domain.engine import EngineSupport, Unmodelled
from flagcore.domain.launch import Launch, Start
from flagcore.domain.model import Model
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue, Merge
from flagcore.domain.spec import AUTO, ImportNote, Spec, Task
from flagcore.domain.trial import Answers, Measurement, Trial
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import N_, Message, _
from flagcore.spec.models import model_from
from flagcore_serving.advice import spec_warnings, speculations
from flagcore_serving.bounds import ServingBounds
from flagcore_serving.launch import importing
from flagcore_serving.launch.start import EngineProfile
from flagcore_serving.load.figures import SteadyState
from flagcore_serving.load.traffic import in_flight, traffic
from flagcore_serving.model.predict import predict
from flagcore_serving.model.simulation import Simulation
from flagcore_serving.model.work import HOST_RATE, Overheads, build_of, overheads_of
from flagcore_serving.published import published
from flagcore_serving.schedules import schedule_of
from flagcore_serving.space import knobs as common_knobs
from flagcore_serving.space import placement, rules
from flagcore_serving.space.adapters import check_adapters
from flagcore_serving.space.hardware import DP, EP, INSTANCES, PP, PREFILL_DECODE, TP, Hardware
from flagcore_serving.space.knobs import CONTEXT, LAYOUT
from flagcore_serving.space.roles import roles
from flagcore_serving.space.weights import check_formats, min_devices
from flagcore_serving.trial import reading
from flagcore_serving.trial.answers import compared
from flagcore_serving.trial.failures import PATTERNS
from flagcore_serving.trial.reading import with_measured_acceptance


class ServerCommands(Commands):
    """Reads commands that start servers of an engine."""

    def __init__(self, engine: EngineProfile) -> None:
        self.engine, self.images = engine, engine.program.images

    def role(self, command: Sequence[str], directory: str) -> str | None:
        starts = importing.starts(self.engine, command, directory)
        return importing.role(self.engine, command) if starts else None

    def read(self, start: Start, directory: Path, model: str | None) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        return importing.spec_of_command(self.engine, start, directory, model)


MOST_SHARE = 0.97
"""The largest share of memory that a message recommends: contexts of the driver need the rest."""


class ServingPlans(Plans):
    """Plans of serving jobs."""

    def __init__(self, engine: "ServingEngine") -> None:
        self.engine = engine

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        return {} if task.spec.serve.only_best else self.engine.defaults(task)

    def unusual(self, task: Task, columns: Columns, predictions: Predictions) -> IntArray:
        """Return the number of unusual properties of each candidate.

        These are more pipeline stages than nodes that the weights need, unless the engine splits by stages, and a mean
        TTFT of more than half of the time of a request. Such stages count as `DEEP` properties.
        """
        kinds, figures = placement.instance_kinds(task, columns), predictions.figures
        needed = max(1, min_devices(task) // task.cluster.linked_devices)
        is_deep = (self.engine.split_by != PP) & (self.engine.settings(task, kinds.columns).pipeline > needed)
        is_late = figures["ttft_s.mean"] > 0.5 * figures["e2e_s.mean"]
        return DEEP * (kinds.total(np.where(is_deep, 1.0, 0.0)) > 0).astype(np.int64) + is_late

    def scheduled(self, problem: Any, /) -> Any:
        """See `Plans`. Raises SpecError if no installed distribution asks this engine."""
        if not problem.task.spec.serve.scheduled:
            return problem
        if schedule := schedule_of(self.engine.name):
            return schedule.scheduled(problem)
        fix = _("install {package}, or use estimate", package=f"flagcore-{self.engine.name}-schedule")
        text = _("needs a distribution that asks {engine} itself", engine=self.engine.name)
        raise SpecError(key="auto_tuner.control.fidelity", value="schedule", problem=text, fix=fix)

    def shortage(self, figures: Mapping[str, float]) -> str:
        cache, least = figures["kv_cache_bytes"], figures["kv_cache_least_bytes"]
        if cache >= least:
            return ""
        if figures["kv_cache_tokens"] < 1:
            if (enough := figures.get("kv_cache_enough_share", math.inf)) < MOST_SHARE:
                text = N_("its share of memory has no room for its cache: at least {share:.2f} is needed")
                return _(text, share=math.ceil(100.0 * enough) / 100.0)
            return _("no memory is left for its cache")
        of_states = N_(
            "its cache of ~{have:.4g} GiB is too small for the states of its sequences, which need ~{need:.4g}: "
            "give the cache more memory, or serve fewer at once"
        )
        text = N_(
            "its cache of ~{have:.4g} GiB is too small for a request of the longest context, which needs ~{need:.4g}: "
            "give the cache more memory, or set auto_tuner.baseline.context_len to at most ~{tokens:,.0f}"
        )
        text = of_states if figures.get("kv_cache_state_bytes") else text
        return _(text, have=cache / 2**30, need=least / 2**30, tokens=figures["kv_cache_tokens"])

    def image(self, task: Task, support: EngineSupport) -> str:
        """Return the published image of the engine for the chip: the vendor's, or else the engine's own.

        Only the tag of the engine's image follows the release in the spec.
        """
        version, chip = task.spec.work.engine_version or "", task.cluster.groups[0].chip
        for key, image in support.container.images.items() if support.container else ():
            if fnmatchcase(f"{self.engine.name} {chip.name}", key if " " in key else f"{key} *"):
                return image
        image = self.engine.program.published.get(chip.vendor.casefold(), "")
        return re.sub(r":v\d+(\.\d+)+", f":v{version}", image) if version.count(".") >= 2 else image

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


class ServingEngine(EngineProfile):
    """A serving engine: its search space, predictions and trials, as all serving engines have them."""

    targets: Mapping[str, Collection[str]] = {"compose": ("image",)}
    per_server: bool = False
    failures = PATTERNS

    def __init__(self) -> None:
        super().__init__()
        self.commands, self.plans = ServerCommands(self), ServingPlans(self)
        layout = [knob.name for knob in self.knobs if knob.layout]
        self.bounds = ServingBounds(self.rough, self.rules, layout)

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return merges that treat the engine's defaults as not set, and that ignore drafts without speculation."""
        has_drafts = any(knob.name == common_knobs.DRAFTED for knob in self.knobs)
        return (*rules.same_as_unset(self.program), *((rules.no_drafts(),) if has_drafts else ()))

    def check_values(self, spec: Spec) -> None:
        if groups := spec.cluster.groups:
            problem = "are several kinds of nodes, but servers are planned on one"
            chips = ", ".join(each.chip for each in groups)
            fix = "write a spec with cluster.chip, nodes and devices_per_node for each of them"
            raise SpecError(key="cluster.groups", value=chips, problem=problem, fix=fix)
        check_formats(spec)

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
        overheads that differ on the chip, of which None is the default of `Overheads`; a build has its own, but for
        factors on intervals. Raises SpecError for an unknown name of these.
        """
        serve, releases = task.spec.serve, self.program.overheads
        known = {each.name: each.default for each in fields(Overheads)}
        if unknown := sorted((on_chip := on_chip or {}).keys() - known):
            problem = f"is not an overhead of {self.program.title}"
            raise SpecError(file="quirks.yaml", key=f"overheads.values.{unknown[0]}", problem=problem)
        on_chip = {name: known[name] if value is None else value for name, value in on_chip.items()}
        if build_of(releases, serve.engine_version):
            on_chip = {name: value for name, value in on_chip.items() if name in ("compared", "uncalibrated")}
        overheads = replace(overheads_of(releases, serve.engine_version), **on_chip)
        if overheads.whole_unless_latent and not latent_layers(task.spec.model):
            overheads = replace(overheads, mixes=False)
        if on_host:
            overheads = replace(overheads, attention=0.0, latent=0.0, ffn=0.0, experts={}, launch=0.0)
            if self.host_times is not None:
                iteration, sequence = self.host_times
                overheads = replace(overheads, iteration=iteration, sequence=sequence, request=3e-3, entry=0.5e-3)
        receive = serve.engine_args.get(self.receive_flag)
        return replace(overheads, receive=receive) if isinstance(receive, int) and receive > 0 else overheads

    def predict(
        self,
        task: Task,
        columns: Columns,
        costs: Costs,
        *,
        simulates: bool = True,
        simulation: type[Simulation] | None = None,
    ) -> Predictions:
        """See `Engine`. Without `simulates`, metrics are in closed form. `simulation`: as in `Price`."""
        kinds = placement.instance_kinds(task, columns)
        return predict(
            task,
            self.settings(task, kinds.columns),
            costs,
            self.overheads_for(task, on_host=costs.synchronous, on_chip=costs.overheads),
            untested=bool(self.untested),
            kinds=kinds,
            draft=self.draft(task.spec),
            simulates=simulates,
            simulation=simulation,
        )

    def rough(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """See `Engine`. Metrics are in closed form."""
        return self.predict(task, columns, costs, simulates=False)

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

    def columns_of(self, task: Task, candidate: Candidate) -> dict[str, IntArray]:
        """Encode a candidate as one-row columns, without the knobs of plugins."""
        engine_knobs = {axis.knob for axis in self.axes(task)}
        return self.columns(task, {knob: value for knob, value in candidate.items if knob in engine_knobs})

    def published(self, task: Task, values: Mapping[str, KnobValue], notes: str) -> Published:
        return published(self, task, values, notes)

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
        for knob in self.knobs:
            searched = knob.value_in(space)
            if knob.name not in LAYOUT or knob.name in fixed:
                continue
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

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice if servers of `spec` cannot be started from this machine."""
        serve, cluster = spec.serve, spec.cluster
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
        """See `Engine`. Raises UsageError for a trial that the installed engine itself would refuse to start."""
        schedule = None if for_real else schedule_of(self.name)
        if schedule and (refusal := schedule.refusal(self, platform, candidate)):
            raise UsageError(refusal)
        predicted = {} if for_real else self._predicted(platform, candidate)
        return self.started(platform, candidate, folder, predicted, for_real=for_real)

    def _predicted(self, platform: Platform, candidate: Candidate) -> Mapping[str, float]:
        """Return the predicted metrics of a candidate by name, without NaN and infinite values."""
        columns = self.columns_of(platform.task, candidate)
        figures = self.predict(platform.task, columns, platform.costs).row(0).figures
        return {name: float(value) for name, value in figures.items() if math.isfinite(value)}

    def trial_notes(self, platform: Platform, candidate: Candidate | None) -> Sequence[str]:
        """See `Engine`. They say what the installed engine itself was asked."""
        schedule = schedule_of(self.name)
        if schedule and candidate:
            schedule.refusal(self, platform, candidate)
        return schedule.notes() if schedule else ()

    def unmodelled(self, task: Task) -> tuple[Unmodelled, ...]:
        # all candidates that speculate draft with a head, or with another model that is known
        schemes = {self.program.schemes_of(task.spec).get(each, "") for each in speculations(task.spec, self.program)}
        unknown = {"", *(["draft_model"] if self.draft(task.spec) is None else [])}
        drafts = {f"serve.engine_args.{self.program.draft_flag}"} if schemes and not schemes & unknown else set[str]()
        found = tuple(each for each in self.program.unmodelled(task.spec) if each.name not in drafts)
        if task.cluster.groups[0].chip.host_bytes_per_second or not self.program.offloaded_bytes(task.spec):
            return found
        why = f"the rate of the link of this chip's host is not known, and {HOST_RATE / 1e9:g} GB/s are assumed"
        return (*found, Unmodelled(name=f"serve.engine_args.{self.program.offload_flag}", why=why, time=(0.4, 1.3)))

    def warnings(self, task: Task) -> Sequence[str]:
        return [*spec_warnings(task.spec, self.program), *self._exchange_notes(task)]

    def _exchange_notes(self, task: Task) -> tuple[str, ...]:
        """Return a note on the exchange that candidates with experts on several hosts have, if the spec sets none."""
        if not rules.exchange_merge(task, self.program):
            return ()
        values = {axis.knob: axis.values for axis in self.axes(task)}
        pairs = [roles(str(word)) for word in values[PREFILL_DECODE] if word]
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

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        kinds = placement.instance_kinds(task, self.columns_of(task, candidate))
        instance_devices = np.repeat(self.settings(task, kinds.columns).devices, kinds.count)
        return reading.read(task, candidate, folder, instance_devices.tolist())

    def answers(self, task: Task, change: str, folder: str, baseline: str) -> Answers | None:
        return compared(task, change, folder, baseline)

    def learned(self, task: Task, trials: Sequence[Trial]) -> Task:
        return with_measured_acceptance(task, trials, self.program.schemes_of(task.spec))


CACHE_SHARE = 0.25
"""Minimum share of the used memory that an expert reserves for the cache. To get it, an instance gets more devices."""


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
