"""The validated content of a spec file or of a job record, and the objectives of a search.

The search minimizes seconds; reports convert them to the unit of the objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import numpy as np

from flagcore.domain.cluster import Cluster
from flagcore.domain.knob import Knob
from flagcore.domain.model import Model
from flagcore.domain.serving import LATENCIES, RATES, STATISTICS, ServeSpec
from flagcore.domain.space import FloatArray, IntArray, KnobValue
from flagcore.domain.trial import Measurement

Precision = Literal["bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

KIND, SLOTS = "{type}", "{slots}"
"""Placeholders of a host of several node groups: the name of its group, and its number of devices."""
HOSTFILE = "{hostfile}"
"""The placeholder in the user's command for a file that lists the hosts of the trial."""

LOCAL = "local"
"""The name of the launcher that starts trials on this machine."""

AUTO = "auto"
"""In a space: all values that the engine suggests. For a chip: the detected one. For a precision: the fastest one."""

SettingValue: TypeAlias = KnobValue | float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The requested hardware. Fields that are None come from the detected hardware.

    `groups` are node groups of different chips or speeds in the order of their ranks. They replace all other fields
    except `hosts` (in the same order), `host_envs` and `nodes`, the number of hosts. A group has own `envs`, a `name`,
    empty for that of its chip, and a `speed` relative to the chip. `host_envs` are the variables of single hosts.

    The last `spares` of `hosts` replace hosts that fail. Without further spares, trials run on at least `min_nodes`
    nodes; None: on all.
    """

    chip: str = AUTO
    nodes: int = 1
    devices_per_node: int | None = None
    memory_bytes_per_device: int | None = None
    cpus_per_node: int | None = None
    hosts: tuple[str, ...] = ()
    spares: int = 0
    min_nodes: int | None = None
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
        """The type of a group's hosts in host files."""
        return self.name or self.chip

    @property
    def survives_loss(self) -> bool:
        """Whether trials can run without a host that failed."""
        return bool(self.spares or self.min_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """A training job.

    `command` is the user's launch command, which runs in `directory`, the folder of the spec. None: flagcore's trial
    program. `engine_version` is the release of the engine that it starts, None if unknown. `settings` are engine
    settings, the same for all candidates; lists are text with commas. `assumed` are settings that a plan assumes for
    the candidates with which they are legal. `flags` are added to the command by knobs with effects.
    """

    engine: str
    seq_length: int
    global_batch_size: int
    precision: str
    attention: str = "flash"
    implementation: str | None = None
    command: tuple[str, ...] | None = None
    directory: str | None = None
    engine_version: str | None = None
    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    assumed: Mapping[str, SettingValue] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The budget and the options of a search. Times are in seconds.

    `max_time` limits the whole search, `max_time_per_task` a trial; None: no limit, and a limit from the prediction of
    each trial. Steps that are predicted to take more than `max_step_time` are shortened; None: never. `disk_limit` is
    the number of bytes that a trial may write to its folder; None: the default of `Launch`. A trial waits up to
    `device_wait` for devices that other programs use. With `warm_start`, a trial may be forked from a process that has
    imported its modules. Up to `parallel_trials` trials run in parallel, each on its own devices. With `compare_hosts`,
    the speeds of several hosts are compared before the first trial.

    A trial runs on `trial_nodes` of the cluster's nodes: on the first number in the search, on the others in repeats.
    Empty: on all.

    `fidelity` is one of `flagcore.domain.trial.FIDELITIES`. `probes` candidates are probed before the first run. The
    best candidate will run `planned_steps` steps in production; None: unknown.
    """

    train_iters: int = 5
    warmup_iters: int = 1
    max_time_per_task: float | None = None
    max_step_time: float | None = 60.0
    max_time: float | None = None
    disk_limit: int | None = None
    device_wait: float = 60.0
    warm_start: bool = True
    compare_hosts: bool = True
    max_trials: int = 20
    parallel_trials: int | Literal["auto"] = 1
    trial_nodes: tuple[int, ...] = ()
    repeats: int = 1
    run_best: bool = False
    use_experience: bool = True
    fidelity: str = "run"
    probes: int = 0
    planned_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The user's input, before hardware is detected. `work` is the training or serving job."""

    model: Model
    cluster: ClusterSpec
    work: TrainSpec | ServeSpec
    space: Mapping[str, str | tuple[KnobValue, ...]] = field(default_factory=dict)
    baseline: Mapping[str, KnobValue] | None = None
    control: Control = Control()
    objective: str = "tokens_per_second_per_device"
    strategy: str = "learned"
    launcher: str = LOCAL
    envs: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_each_host(self) -> bool:
        """Whether the launcher starts a program on each host of a trial, instead of only on this machine."""
        return bool(self.cluster.hosts) and self.launcher != LOCAL

    @property
    def trial_nodes(self) -> tuple[int, ...]:
        """The numbers of nodes on which trials run."""
        return self.control.trial_nodes or (self.cluster.nodes,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of nodes, ascending, on which trials may run if hosts are lost. Each has a whole global batch."""
        whole = self.cluster.nodes
        fewest = self.cluster.min_nodes or whole
        return tuple(n for n in range(fewest, whole + 1) if self.train.global_batch_size * n % whole == 0)

    def on_nodes(self, nodes: int) -> Spec:
        """Return the spec of a trial on fewer nodes: with a batch that is smaller by the same factor."""
        if nodes == self.cluster.nodes or not isinstance(self.work, TrainSpec):
            return self
        work = replace(self.work, global_batch_size=self.work.global_batch_size * nodes // self.cluster.nodes)
        return replace(self, work=work, cluster=replace(self.cluster, nodes=nodes))

    @property
    def train(self) -> TrainSpec:
        """The training job. Raises TypeError for a serving job."""
        if not isinstance(self.work, TrainSpec):
            raise TypeError("this spec has no training job")
        return self.work

    @property
    def serve(self) -> ServeSpec:
        """The serving job. Raises TypeError for a training job."""
        if not isinstance(self.work, ServeSpec):
            raise TypeError("this spec has no serving job")
        return self.work

    @property
    def limits(self) -> Mapping[str, float]:
        """The upper bounds of measured figures, by the name of the figure."""
        return self.work.slo if isinstance(self.work, ServeSpec) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A spec and the cluster on which it runs.

    `knobs` are the knobs with effects that the spec names: plugins' knobs and compared engine settings.
    """

    spec: Spec
    cluster: Cluster
    knobs: tuple[Knob, ...] = ()

    def listed_values(self, knob: Knob, default: str | Sequence[KnobValue]) -> tuple[KnobValue, ...]:
        """Return the values that the space lists for `knob`; `auto` is resolved. Raises SpecError.

        `default` is `auto` or a list of values. It is used if the space does not have the knob.
        """
        space = self.spec.space
        listed = next((space[name] for name in knob.names if name in space), default)
        if isinstance(listed, str):
            values = knob.auto(self) if knob.auto else knob.values or (knob.neutral,)
        else:
            values = [knob.parse(each, f"auto_tuner.space.{knob.name}") for each in listed]
        return tuple(dict.fromkeys(values))

    def with_time_limit(self, seconds: float) -> Task:
        """Return the task with `max_time_per_task` set to the time limit of a trial."""
        control = replace(self.spec.control, max_time_per_task=seconds)
        return replace(self, spec=replace(self.spec, control=control))

    def on_nodes(self, nodes: int) -> Task:
        """Return the task of a trial on fewer nodes of the only group."""
        (group,) = self.cluster.groups
        cluster = replace(self.cluster, groups=(replace(group, nodes=nodes),))
        return replace(self, spec=self.spec.on_nodes(nodes), cluster=cluster)

    def with_batch(self, global_batch_size: int) -> Task:
        """Return a training task with another global batch size."""
        work = replace(self.spec.train, global_batch_size=global_batch_size)
        return replace(self, spec=replace(self.spec, work=work))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job record. Knobs that are not in `candidate` have the engine's defaults.

    `chip` is a name or an alias. `nic_bytes_per_second` is the network rate and `cpus_per_node` the number of CPUs of a
    host, None if not given. `rank` is the global rank to predict. `notes` is text of the source about engine settings.
    """

    id: str
    kind: str
    model: Model
    chip: str
    devices: int
    devices_per_node: int
    work: TrainSpec | ServeSpec
    candidate: Mapping[str, KnobValue]
    nic_bytes_per_second: float | None = None
    cpus_per_node: int | None = None
    rank: int | None = None
    notes: str = ""


TOKENS_PER_SECOND_PER_DEVICE = "tokens_per_second_per_device"
COST = "cost"
CHEAPEST = {"train": TOKENS_PER_SECOND_PER_DEVICE, "serve": "output_tokens_per_s_per_device"}
"""What COST stands for in a spec, by kind of job: all devices in use are paid, so the most tokens per device are the
cheapest. Training uses all devices of the spec, a server those of its instances."""
SERVING = (*RATES, *LATENCIES, *(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS))
"""The objectives of serving. A latency without a statistic means its mean."""


def is_rate(objective: str) -> bool:
    """Return whether the objective is a rate, for which higher is better."""
    return objective in RATES or objective == TOKENS_PER_SECOND_PER_DEVICE


def figure_name(objective: str) -> str:
    """Return the key of `Measurement.figures` for a serving objective."""
    return f"{objective}.mean" if objective in LATENCIES else objective


def seconds(objective: str, figure: float) -> float:
    """Convert a figure of a serving objective to seconds: a latency, or the seconds per unit of a rate."""
    if not is_rate(objective):
        return figure
    return 1.0 / figure if figure > 0 else float("inf")


def objective_value(objective: str, seconds: float, measured: Measurement | None = None) -> float:
    """Convert `seconds` to the unit of the objective. For training, the rate is scaled from that of `measured`."""
    if objective == TOKENS_PER_SECOND_PER_DEVICE:
        assert measured is not None
        return measured.tokens_per_second_per_device * measured.step_time_s / seconds
    return 1.0 / seconds if is_rate(objective) else seconds


def pareto(first: FloatArray, second: FloatArray) -> IntArray:
    """Return the indices of the points for which no other has a higher `first` and a higher `second`, by descending
    `first`. Points with NaN are not among them.
    """
    order = np.lexsort((-second, -first))
    order = order[~np.isnan(first[order]) & ~np.isnan(second[order])]
    best_before = np.maximum.accumulate(np.concatenate(([-np.inf], second[order])))[:-1]
    return order[second[order] > best_before].astype(np.int64)
