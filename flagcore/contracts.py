"""The Protocols that the core calls. Whoever implements one need not import anything else of flagcore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.chip import Chip, Device
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport
from flagcore.domain.experience import Features, Past
from flagcore.domain.launch import Exit, FailurePattern, Launch
from flagcore.domain.plugin_knob import PluginKnob
from flagcore.domain.prediction import Components, ModelPart, Predictions, RankPrediction
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Axis, BoolArray, Columns, FloatArray, IntArray, Merge, Rule, Space
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import RUN, Measurement, Role, Trial


class MemoryModel(Protocol):
    """From what tensors take to what the device shows, in bytes of one device. Called with whole columns."""

    def capacity_bytes(self) -> float | None:
        """Return what a trial may use of one device, or None if nobody knows."""

    def workspace_bytes(self) -> float:
        """Return what a thread's workspace of the library of matrix products takes of the allocator."""

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        """Return what the allocator holds when tensors take `allocated` at their peak."""

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        """Return what the device shows in use: `reserved`, context, libraries and collective buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of causal attention on one device, of a batch of sequences of equal length. The fields broadcast.

    Training has as many `queries` as `keys`. An engine that serves asks the same of its steps: a prompt, or a piece of
    one, is `queries` at the end of the `keys` that are then cached; decoding is one query on a context of `keys`,
    `batch` sequences at once, whose keys and values are read from the cache, in pages or in one piece. Sequences of
    several lengths are several elements.
    """

    batch: FloatArray
    """Sequences."""
    heads: FloatArray
    """Query heads of a sequence that this device has."""
    groups: FloatArray
    """Key and value heads that these share: as many as `heads` without grouping."""
    queries: FloatArray
    """Positions computed: the last of the `keys`."""
    keys: FloatArray
    """Positions attended to, cached ones included."""
    head_dim: FloatArray
    """Width of a head; where keys and values differ in it, the mean."""


class KernelCosts(Protocol):
    """Seconds that kernels take on one device, the host's time to launch them not included.

    All sizes are arrays that broadcast; NaN where unknown.
    """

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of C[m,n] = A[m,k] B[k,n] in `precision` (fp32 bf16 fp16 fp8 mxfp8 nvfp4 ...)."""

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of fused causal attention forward: scores, softmax, values."""

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the backward pass of the same."""

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel that reads and writes `bytes_moved` in all."""

    def launch_seconds(self) -> float:
        """Return the time in which the host launches one kernel after another, framework included."""

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time to copy between device and pinned host memory, one way."""

    def in_runs(self) -> float:
        """Return what kernels take in a run on many devices over what these times say: 1 where they are of such runs.

        Kernels measured alone take longer there: power and clocks of all devices, waits that no part names.
        """


class CollectiveCosts(Protocol):
    """Seconds that collectives take between devices."""

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of one collective in a group of `ranks` devices that are `stride` devices apart.

        `kind` is all_reduce, all_gather, reduce_scatter, all_to_all or send. `payload_bytes` is the whole
        tensor: the reduced one, the gathered one, what is scattered, what a rank holds before an
        all-to-all, the message. A group of one costs nothing; NaN where unknown.
        """

    def compute_taken(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the share (0 to 1) of a device's compute that a running collective takes from kernels beside it."""


class Telemetry(Protocol):
    """A reading of one device while a trial runs."""

    def sample(self) -> Mapping[str, float]:
        """Return figures by name, e.g. `memory_used_bytes`, `power_watts`, `temperature_celsius`."""


class PruningRule(Protocol):
    """A vendor's or user's knowledge of what is not worth trying. `name` is counted, `says` is shown."""

    name: str
    says: str

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        """Return True for each candidate that should not be tried. Asked in pieces: a row must not depend on others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What predictions are made of: the plugins' answers, or the core's roofline where they have none.

    `guessed` says that nobody measured the chip's kernels, or fitted a curve to them. `synchronous` says that the host
    computes itself, as a plain CPU does: its launches take their own time, behind no kernel. `in_runs` is by how much
    kernels are longer in a run on many devices than `kernels` says.

    They are those of the first node group. `further` are those of the others by the rank of their first device, in the
    order of ranks, and `between` tells what a message from one group to the next takes; without others it is None.
    """

    memory: MemoryModel
    kernels: KernelCosts
    collectives: CollectiveCosts
    guessed: bool = False
    synchronous: bool = False
    in_runs: float = 1.0
    further: Mapping[int, Costs] = field(default_factory=dict)
    between: CollectiveCosts | None = None

    @property
    def groups(self) -> tuple[Costs, ...]:
        """Return the costs of each node group."""
        return (self, *self.further.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """All that plugins said about one task, asked once in discover. `knobs` are all that plugins bring, whether the
    task has them or not, `conflicts` tells where the user's own variables win over those of plugins,
    `read_devices` which device each telemetry is of: its number on this machine."""

    task: Task
    costs: Costs
    support: EngineSupport
    environment: Mapping[str, str]
    pruning_rules: tuple[PruningRule, ...]
    failure_patterns: tuple[FailurePattern, ...]
    telemetry: tuple[Telemetry, ...]
    prepare_launch: Callable[[Launch], Launch]
    knobs: tuple[PluginKnob, ...] = ()
    engine_version: str | None = None
    conflicts: tuple[str, ...] = ()
    read_devices: tuple[int, ...] = ()

    def prepared(self, planned: Launch) -> Launch:
        """Return `planned` with the plugins' environment, then the spec's, and whatever plugins change in it."""
        environment = {**planned.environment, **self.environment, **self.task.spec.envs}
        return self.prepare_launch(replace(planned, environment=environment))

    @property
    def memory_limit_bytes(self) -> int | None:
        """What the processes of a node may take where they live in its own memory; None where devices have theirs."""
        group = self.task.cluster.groups[0]
        memory = group.memory_bytes * group.devices_per_node if group.memory_bytes else None
        return memory if self.support.shared_devices else None


class Plugins(Protocol):
    """The hooks as typed methods. A plugin that fails costs only its own answer."""

    def devices(self) -> tuple[Device, ...]: ...
    def undetected(self) -> Mapping[str, str]: ...
    def chips(self) -> tuple[Chip, ...]: ...
    def topology(self, group: NodeGroup) -> Topology | None: ...
    def memory_model(self, group: NodeGroup, engine: str) -> MemoryModel | None: ...
    def kernel_costs(self, chip: Chip, engine: str) -> KernelCosts | None: ...
    def collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | None: ...
    def environment(
        self, chip: Chip, engine: str, engine_version: str | None = None, task: Task | None = None
    ) -> Mapping[str, str]: ...
    def engine_support(self, chip: Chip, engine: str, engine_version: str | None = None) -> EngineSupport: ...
    def knobs(self, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[PluginKnob, ...]: ...
    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]: ...
    def prepare_launch(self, launch: Launch, task: Task) -> Launch: ...
    def failure_patterns(
        self, chip: Chip, engine: str, engine_version: str | None = None
    ) -> tuple[FailurePattern, ...]: ...
    def telemetry(self, device: Device) -> Telemetry | None: ...


class Workload(Protocol):
    """One engine: its knobs, their rules, its flags, its metrics. Knows no vendor."""

    name: str
    modules: Mapping[str, str]
    """What trials import, and the pip requirement that brings it."""

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the knobs of the space in the order in which they are crossed."""

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return what makes a candidate illegal."""

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return what makes two candidates the same."""

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return memory and time for whole columns. Extra knobs of job records may be among them."""

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        """Return parameters and bytes by component for one pipeline stage of each row."""

    def rank(self, task: Task, columns: Columns, rank: int, costs: Costs) -> RankPrediction:
        """Return the figures of one global rank of the candidate in `columns`, which have one row."""

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return what the speed of kernels depends on in each row, whatever the model: logarithms to base 2.

        Errors of predictions are learned over them, so they should be few and mean the same in every task.
        """

    def parts(self, task: Task) -> tuple[ModelPart, ...]:
        """Return the weights of the model by its parts, before anything is split."""

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        """Return what is legal but never worth a trial, on any chip."""

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows need at least as much memory as `candidate` whatever the model: one order a knob."""

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which rows take at least as long as `candidate` whatever the model: one order a knob."""

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Return columns of one row from knob values, the same columns for all. Raises SpecError for a wrong value."""

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return the task and the knobs of a job record, a run that somebody published, with what it leaves out.

        `notes` are its source's own words. The names are of the settings that these tell of: the rules of these names
        do not make the record illegal, for it ran. Raises SpecError, and NotModelled for what no formula covers.
        """

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the few values among which an expert would choose without measuring."""

    def rule_of_thumb(self, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the usual space that an expert would write down."""

    def ready(self, spec: Spec, *, probe: bool = False) -> None:
        """Return if trials of `spec`, or probes, can run here. Raises SpecError or NoDevice with what is in the way."""

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Write what a run needs into `folder` and return how to start it.

        A trial is cut to `control.train_iters` steps; `for_real` is the user's own job with this candidate.
        """

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that tells the seconds of the steps a running trial has finished, warm-up included.

        It is called about twice a second while the trial runs, and reads on where it was.
        """

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return what a finished trial measured; with `partial`, what the steps so far of an ended one did.

        Raises flagcore.errors.FlagError with one line that says what is missing.
        """

    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the global ranks of a candidate that tell most of it when one device plays them, in order."""

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Write what a probe of one rank needs into `folder` and return how to start it.

        `device` is the place of the device that it is to use among those of its chip on this machine.
        """

    def read_probe(self, task: Task, folder: str) -> RankMeasurement:
        """Return what a finished probe measured. Raises flagcore.errors.FlagError with what is missing."""

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return what this engine's own log lines mean."""


class Running(Protocol):
    """A started launch."""

    def poll(self) -> Exit | None:
        """Return how it ended, or None while it runs."""

    def wait(self, seconds: float) -> Exit | None:
        """Wait at most `seconds` and return like `poll`."""

    def stop(self) -> Exit:
        """End the whole tree of processes and return how it ended. Returns at once if it has ended."""


class Launcher(Protocol):
    """Starts launches somewhere."""

    name: str

    def start(self, launch: Launch) -> Running:
        """Start `launch` in a process group of its own. Raises FlagError if it cannot be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a strategy sees when the next trial is to be chosen.

    `open_rows` (never empty) are rows of `space` that no rule removed and no trial settled. `trials` is one a
    candidate, in order; `probes` were probed where trials run. `features` gives what errors of predictions may depend
    on for some rows, and `past` is what trials of other runs were measured at. `seconds_left` is None without a limit.
    """

    task: Task
    space: Space
    predictions: Predictions
    open_rows: IntArray
    trials: Sequence[Trial]
    features: Callable[[IntArray], Features]
    past: Past
    seconds_left: float | None = None
    probes: Sequence[Trial] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The row to try next, or None if no further trial is worth its cost; `because` says why, in one line.

    `belief` is what the strategy expects of it now, as plain data in the format of predictions.
    """

    row: int | None
    because: str
    belief: Mapping[str, object] = field(default_factory=dict)


class Strategy(Protocol):
    """The order in which candidates are tried."""

    name: str

    def next(self, scene: Scene) -> Choice:
        """Return what to try next."""


class TrialStore(Protocol):
    """Trials that survive a kill. What was read never changes later; a finished trial is kept once."""

    def trials(self) -> tuple[Trial, ...]:
        """Return every finished trial in order."""

    def begin(self, candidate: Candidate, role: Role, predicted: Mapping[str, object], fidelity: str = RUN) -> Trial:
        """Note that a trial starts, and return it with its number."""

    def finish(self, trial: Trial) -> None:
        """Keep the trial for good."""

    def folder(self, trial: Trial) -> str:
        """Return the absolute path of the trial's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that the user may want to see. The command line draws it, tests count it.

    `kind` is trial_started or trial_finished; `seconds_left` estimates the rest of the run, repeats included.
    `objective` is that of the run.
    """

    kind: str
    trial: Trial
    trials_finished: int
    trials_planned: int
    seconds_left: float | None
    best: Trial | None
    objective: str = ""


class OnEvent(Protocol):
    """Receives events."""

    def __call__(self, event: Event) -> None: ...
