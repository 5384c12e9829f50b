"""The validated content of a spec file or of a job record, and the objectives of a search.

The search always minimizes seconds. Reports convert them to the unit of the objective.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from annotated_types import Interval

from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.knob import Effect, Knob
from flagcore.domain.metrics import LATENCIES, RATES, STATISTICS
from flagcore.domain.model import Model
from flagcore.domain.secrets import secrets_in_data
from flagcore.domain.space import KnobValue
from flagcore.domain.trial import FIDELITIES, RUN, Measurement
from flagcore.domain.units import Devices, Fraction, Memory, NoLayers, OneOf, Seconds, Size, Wait
from flagcore.domain.work import Lengths, Work
from flagcore.i18n import _

TOKENS_PER_SECOND_PER_DEVICE = "tokens_per_second_per_device"

Precision = Literal["bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4", "mxfp4"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj", "out_proj",
                 "experts.gate_up_proj", "experts.down_proj"]  # fmt: skip
KIND, SLOTS = "{type}", "{slots}"
"""Placeholders in the user's command on several node groups: the name of the host's group, and the host's number of
devices."""
HOSTFILE = "{hostfile}"
"""The placeholder in the user's command for the path of a file that lists the hosts of the trial."""

LOCAL = "local"
"""The name of the launcher that starts trials on this machine."""

AUTO = "auto"
"""The word for a value that flagcore chooses: all values that the engine suggests for a knob in a space, the detected
chip, or the fastest precision."""

SettingValue: TypeAlias = KnobValue | float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The requested hardware. Fields that are None are filled in from the detected hardware.

    `groups`: node groups with different chips or speeds, in the order of their ranks. If there are any, all other
    fields are unused except `hosts` (in the same order), `users`, `host_envs`, and `nodes`, the number of hosts.
    `envs`, `name`, `speed`: only for an item of `groups`: the group's environment variables, its name (empty means the
    name of its chip), and the speed of its devices relative to the chip.
    `users`: the users who log in to `hosts` by ssh, by host. Hosts without an entry use the default user.
    `host_envs`: environment variables of single hosts, by host.
    `spares`: the number of spare hosts, which are the last ones of `hosts`. They replace hosts that fail.
    `min_nodes`: if no spare is left, trials run on at least this number of nodes. None means on all nodes.
    `wait_for_hosts`: the maximum number of seconds to wait for a lost host.
    """

    chip: str = AUTO
    nodes: int = 1
    devices_per_node: int | None = None
    memory_bytes_per_device: int | None = None
    cpus_per_node: int | None = None
    hosts: tuple[str, ...] = ()
    users: Mapping[str, str] = field(default_factory=dict)
    spares: int = 0
    min_nodes: int | None = None
    wait_for_hosts: float = 300.0
    nic_bytes_per_second: float | None = None
    nic_latency_seconds: float | None = None
    price_per_device_hour: float | None = None
    envs: Mapping[str, str] = field(default_factory=dict)
    host_envs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    groups: tuple[ClusterSpec, ...] = ()
    name: str = ""
    speed: float = 1.0

    @property
    def kind(self) -> str:
        """The type of the group's hosts in host files: the name of the group, or of its chip."""
        return self.name or self.chip

    def with_measured(self, values: Mapping[str, float]) -> ClusterSpec:
        """Return the cluster with measured values of those fields that are None."""
        missing: Any = {name: value for name, value in values.items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Low-rank adapters, which are trained instead of the weights."""

    kind: Annotated[str, OneOf(("lora", "dora", "qlora"))] = "lora"
    """LoRA, DoRA (with a trained magnitude of each output), or QLoRA (LoRA on quantized weights)."""
    rank: Annotated[int, Interval(ge=1, le=4096)] = 32
    """Inner width of the adapters."""
    targets: str | tuple[str, ...] = "all-linear"
    """Layers with an adapter: all-linear (all but embedding, router and head, or what a library takes), or projections
    of queries, keys, values, attention output, networks and experts, of other mixers (in_proj, out_proj), or the
    parameters of stacked experts (experts.*)."""
    base: Annotated[str, OneOf(("nf4", "int8", "fp32"))] | None = None
    """Number format of the frozen linear layers, fp32 of all weights; null: nf4 for qlora, else that of the job."""
    quantized_experts: bool = False
    """Whether experts are in it, too, where a layer stores all of them as one parameter, as transformers 5 does."""
    fp32_experts: bool = False
    """Whether experts that are not in it are stored in fp32, as PEFT's `prepare_model_for_kbit_training` casts them."""
    dropout: bool = False
    """Whether the inputs of adapters pass a dropout, of which each adapter stores its own result and mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec(Work):
    """A training job. Its `directory` is by default the folder of the spec."""

    kind: ClassVar[str] = "train"
    documents: ClassVar[str] = "flagcore.spec.schema"
    records: ClassVar[str] = "flagcore.spec.jobs"
    default_objective: ClassVar[str] = TOKENS_PER_SECOND_PER_DEVICE
    cheapest_objective: ClassVar[str] = TOKENS_PER_SECOND_PER_DEVICE

    paths: ClassVar[tuple[tuple[str, ...], ...]] = (("lengths", "file"),)

    seq_length: Size
    """Tokens per sample."""
    global_batch_size: Size
    """Samples per step, over all devices."""
    lengths: Lengths | None = None
    """Lengths of the samples; null: all have seq_length tokens."""
    attention: Annotated[str, OneOf(("flash", "unfused"))] = "flash"
    """Attention kernel: fused (flash), or storing the scores in memory (unfused)."""
    implementation: Annotated[str, OneOf(("local", "transformer_engine"))] | None = None
    """Implementation of the layers; null: the engine's default."""
    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    """Settings of the engine that are the same for all candidates. Lists are comma-separated text."""
    assumed: Mapping[str, SettingValue] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Arguments that knobs with effects add to the command."""
    program: Any = None
    """What the engine must know about the program that `command` starts; only for engines for any program."""
    adapter: Adapter | None = None
    """Low-rank adapters that are trained, the other weights are frozen; null: all weights are trained."""
    mtp_num_layers: NoLayers | None = None
    """Trained depths of multi-token prediction; null: of an inline shape, or of files if an engine trains all."""
    untrained_depths: int | None = None

    @property
    def step_samples(self) -> int:
        return self.global_batch_size

    @property
    def step_tokens(self) -> int:
        tokens = self.lengths.tokens(self.seq_length) if self.lengths else self.seq_length
        return round(self.global_batch_size * tokens)

    @property
    def is_plain_training(self) -> bool:
        return not (self.lengths or self.adapter)

    @property
    def missing(self) -> str:
        return "" if self.is_plain_training or self.command else "command"

    @property
    def runs_as(self) -> str:
        return _("as train.command runs it") if self.command else ""

    def with_samples(self, samples: int) -> TrainSpec:
        return replace(self, global_batch_size=samples)

    def with_flags(self, flags: tuple[str, ...]) -> TrainSpec:
        return replace(self, flags=flags)

    def with_settings(self, settings: Mapping[str, SettingValue]) -> TrainSpec:
        return replace(self, settings={**self.settings, **settings})

    def with_advice(self, section: str, name: str, value: SettingValue, knobs: Collection[str]) -> TrainSpec:
        is_used = section == "settings" and self.command
        return replace(self, settings={name: value, **self.settings}) if is_used else self

    def record(self, versions: Mapping[str, str]) -> dict[str, Any]:
        sizes, names = ("seq_length", "global_batch_size", "precision", "attention"), ("implementation", "settings")
        found = {name: getattr(self, name) for name in (*sizes, *names, "engine", "engine_version")}
        if each := self.lengths:
            batches = {"batching": each.batching, "balanced": each.balanced}
            found["lengths"] = {"histogram": {str(key): n for key, n in Counter(each.values).items()}, **batches}
        return found | ({"adapter": asdict(self.adapter)} if self.adapter else {})

    def distance(self, other: Any) -> float:
        scale: float = abs(math.log2(self.seq_length / other.seq_length))
        other_lengths, other_weights = (
            (mine is None) != (others is None)
            for mine, others in ((self.lengths, other.lengths), (self.adapter, other.adapter))
        )
        return float(self.precision != other.precision) + 2.0 * other_lengths + 3.0 * other_weights + scale / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The budget and the options of a search. Numbers of times are seconds, those of sizes are bytes."""

    max_time_per_task: Seconds | None = None
    """Wall-clock limit of one trial; null: derived from its prediction, 1200 s for servers."""
    max_time: Seconds | None = None
    """Wall-clock limit of the whole search; null: none."""
    disk_limit: Memory = None
    """Maximum size of a trial's folder, in bytes or with a unit (60G is 60GB, 60Gi is 60GiB); null: 2 GiB."""
    device_wait: Wait = 60.0
    """Time that a trial waits for devices that other programs use before it fails."""
    max_trials: Annotated[int, Interval(ge=1, le=1_000_000)] = 20
    """Maximum number of trials."""
    parallel_trials: Literal["auto"] | Annotated[int, Interval(ge=1, le=1_000_000)] = 1
    """Maximum number of parallel trials, each on its own devices or hosts; auto: as many as the devices allow."""
    repeats: Annotated[int, Interval(ge=0, le=1_000)] = 1
    """Minimum number of times that the baseline, the best and its rivals run again at the end."""
    indifference: Fraction = 0.02
    """Relative gain that does not matter; at least the noise. The search ends when no larger gain is expected."""
    answers: Fraction | None = 0.01
    """Limit of what trials may change in answers: of the loss, or of the probability of a token; null: no check."""
    run_best: bool = False
    """Whether the best configuration is started at the end."""
    use_experience: bool = True
    """Whether measurements of earlier runs on the same chip correct the predictions."""
    train_iters: Annotated[int, Interval(ge=2, le=1_000_000)] = 5
    """Steps per trial."""
    max_step_time: Seconds | None = 60.0
    """Longer steps run with a smaller global batch, and their time is scaled; null: all steps are whole."""
    warmup_iters: Annotated[int, Interval(ge=0, le=1_000_000)] = 1
    """Warm-up steps of a trial, which are not measured; fewer than train_iters."""
    fidelity: Annotated[str, OneOf(FIDELITIES)] = RUN
    """Fidelity of trials: predictions only, single ranks on one device, or the whole job on all devices."""
    trial_nodes: Devices | None = None
    """Nodes of a trial, with fewer data-parallel replicas; null: all of the cluster."""
    warm_start: bool = True
    """Whether, on a CPU, trials of flagcore's program are forked from a process that has imported its modules."""
    compare_hosts: bool = True
    """Whether to compare the speed of devices and networks of hosts before the first trial."""
    probes: Annotated[int, Interval(ge=0, le=1_000)] = 0
    """Number of candidates to probe on one device before the first run."""
    planned_steps: Annotated[int, Interval(ge=1, le=1_000_000_000)] | None = None
    """Planned steps of the job; the search ends when no trial is expected to save more time in them than it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The user's input, before the hardware is detected. `work`: the training or serving job."""

    model: Model
    cluster: ClusterSpec
    work: Work
    space: Mapping[str, str | tuple[KnobValue, ...]] = field(default_factory=dict)
    baseline: Mapping[str, KnobValue] | None = None
    control: Control = Control()
    objective: str = "tokens_per_second_per_device"
    strategy: str = "learned"
    launcher: str = LOCAL
    envs: Mapping[str, str] = field(default_factory=dict)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets in the variables of this process and of the spec, and in its job.

        No output may contain them.
        """
        job = {each.name: getattr(self.work, each.name) for each in fields(self.work)}
        return secrets_in_data([os.environ, *self.variables, job])

    @property
    def variables(self) -> tuple[Mapping[str, str], ...]:
        """The environment variables of the job, of its cluster, and of each group and host."""
        of_cluster = [each.envs for each in (self.cluster, *self.cluster.groups)]
        return (self.envs, *of_cluster, *self.cluster.host_envs.values())

    @property
    def on_each_host(self) -> bool:
        """Whether the launcher starts a program on each host of a trial, and not only on this machine."""
        return bool(self.cluster.hosts) and self.launcher != LOCAL

    @property
    def trial_nodes(self) -> int:
        """The number of nodes on which trials run."""
        return self.control.trial_nodes or self.cluster.nodes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The allowed node counts of trials after hosts are lost, in ascending order.

        The global batch shrinks in proportion. Numbers for which it would not be an integer are skipped.
        """
        all_nodes = self.cluster.nodes
        fewest = self.cluster.min_nodes or all_nodes
        return tuple(n for n in range(fewest, all_nodes + 1) if self.work.step_samples * n % all_nodes == 0)

    def on_nodes(self, nodes: int) -> Spec:
        """Return the spec of a trial on fewer nodes, with a global batch that is smaller by the same factor."""
        if nodes == self.cluster.nodes or not self.work.has_steps:
            return self
        work = self.work.with_samples(self.work.step_samples * nodes // self.cluster.nodes)
        return replace(self, work=work, cluster=replace(self.cluster, nodes=nodes))

    @property
    def train(self) -> TrainSpec:
        """The training job. Raises TypeError for a job of another kind."""
        if not isinstance(self.work, TrainSpec):
            raise TypeError("this spec has no training job")
        return self.work

    @property
    def serve(self) -> Any:
        """The job of the kind `serve`. Raises TypeError for a job of another kind."""
        if self.work.kind != "serve":
            raise TypeError("this spec has no serving job")
        return self.work


@dataclass(frozen=True, slots=True)
class ImportNote:
    """A note on how a key of the other tuner was converted.

    `at`: the key path of the spec that the note is about. Empty if there is none.
    """

    key: str
    text: str
    at: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A spec and the cluster on which it runs.

    `knobs`: the knobs in the spec whose values have an `Effect`: plugins' knobs and compared engine settings.
    `stop_above_s`: an engine may stop a trial whose step time is certain to be higher.
    """

    spec: Spec
    cluster: Cluster
    knobs: tuple[Knob, ...] = ()
    stop_above_s: float | None = None

    def listed_values(self, knob: Knob, default: str | Sequence[KnobValue]) -> tuple[KnobValue, ...]:
        """Return the values that the space lists for `knob`, with `auto` replaced by values.

        `default`: `auto` or a list of values, for a knob that is not in the space.
        Raises SpecError for an invalid value.
        """
        space = self.spec.space
        listed = next((space[name] for name in knob.names if name in space), default)
        if isinstance(listed, str):
            values = knob.auto(self) if knob.auto else knob.values or (knob.neutral,)
        else:
            values = [knob.parse(each, f"auto_tuner.space.{knob.name}") for each in listed]
        return tuple(dict.fromkeys(values))

    def devices_on(self, group: NodeGroup) -> int:
        """Return the number of devices of one node of `group` that a trial uses."""
        return min(self.spec.work.cards or group.devices_per_node, group.devices_per_node)

    def for_engine(self, effects: Sequence[Effect] = ()) -> Task:
        """Return the engine's task: without the knobs that have an `Effect`, but with the settings of `effects`."""
        names = {knob.name for knob in self.knobs}
        spec, settings = self.spec, {key: value for effect in effects for key, value in effect.settings.items()}
        if names:
            space = {name: values for name, values in spec.space.items() if name not in names}
            baseline = spec.baseline and {name: value for name, value in spec.baseline.items() if name not in names}
            spec = replace(spec, space=space, baseline=baseline)
        if settings and (work := spec.work.with_settings(settings)) is not spec.work:
            spec = replace(spec, work=work)
        return self if spec is self.spec and not names else replace(self, spec=spec, knobs=())

    def on_nodes(self, nodes: int) -> Task:
        """Return the task of a trial on fewer nodes. The cluster must have a single node group."""
        (group,) = self.cluster.groups
        cluster = replace(self.cluster, groups=(replace(group, nodes=nodes),))
        return replace(self, spec=self.spec.on_nodes(nodes), cluster=cluster)

    def with_batch(self, global_batch_size: int) -> Task:
        """Return a training task with another global batch size."""
        return replace(self, spec=replace(self.spec, work=self.spec.work.with_samples(global_batch_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job record: one candidate on one cluster. Knobs that are not in `candidate` have the engine's defaults.

    `chip`: the name or an alias of the chip.
    `nic_bytes_per_second`: the network rate. None if it is not given.
    `cpus_per_node`: the number of CPUs of a host. None if it is not given.
    `rank`: the global rank to predict. None if it is not given.
    `notes`: free text about engine settings, from the source of the record.
    """

    id: str
    model: Model
    chip: str
    devices: int
    devices_per_node: int
    work: Work
    candidate: Mapping[str, KnobValue]
    nic_bytes_per_second: float | None = None
    cpus_per_node: int | None = None
    rank: int | None = None
    notes: str = ""


COST = "cost"
SERVING = (*RATES, *LATENCIES, *(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS))
"""The objectives of serving. The name of a latency without a statistic means its mean."""


def is_rate(objective: str) -> bool:
    """Return whether the objective is a rate, for which higher is better."""
    return objective in RATES or objective == TOKENS_PER_SECOND_PER_DEVICE


def figure_name(objective: str) -> str:
    """Return the key in `Measurement.figures` under which the value of a serving objective is stored."""
    return f"{objective}.mean" if objective in LATENCIES else objective


def seconds(objective: str, figure: float) -> float:
    """Convert the value of a serving objective to seconds. A rate is converted to seconds per unit."""
    if not is_rate(objective):
        return figure
    return 1.0 / figure if figure > 0 else float("inf")


def objective_value(objective: str, seconds: float, measured: Measurement | None = None) -> float:
    """Convert `seconds` to the unit of the objective.

    `measured`: a measurement, which is needed for tokens per second per device: its rate is scaled to `seconds`.
    """
    if objective == TOKENS_PER_SECOND_PER_DEVICE:
        assert measured is not None
        return measured.tokens_per_second_per_device * measured.step_time_s / seconds
    return 1.0 / seconds if is_rate(objective) else seconds
