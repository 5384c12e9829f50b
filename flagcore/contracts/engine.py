"""The base class of engines, and `Platform`, which is a task with everything that plugins provide for it.

What a single engine can do is a part of it: see `flagcore.contracts.parts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flagcore.contracts.parts import Bounds, Commands, Plans, Published, Steps, differs_only
from flagcore.contracts.plugin import Costs, PruningRule, Telemetry
from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import EngineSupport, Unmodelled, ValueRule
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch, ServerGroups
from flagcore.domain.prediction import Predictions, RankPrediction
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.domain.trial import Answers, Measurement, Trial
from flagcore.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """How trials start on the hosts of one of several node groups.

    `kind`: the type of the hosts in host files.
    `devices`: the number of devices per host.
    `environment`: environment variables from the chip's plugin.
    `envs`: the group's environment variables in the spec.
    """

    kind: str
    nodes: int
    devices: int
    support: EngineSupport
    environment: Mapping[str, str]
    envs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A task, its engine, and everything that plugins provide for the task.

    `telemetry`: a reader for each device whose metrics can be read.
    `value_rules`: the values of knobs and settings that do not work on the chips.
    `knobs`: all plugins' knobs for the chip, including those that the spec does not name.
    `conflicts`: descriptions of environment variables that the user and a plugin set to different values.
    `devices`: the detected devices of the task's chips that its trials can use, in order.
    `cores`: the CPU cores that trials can use. Empty means all.
    `setups`: how trials start on each node group, in order. Empty if there is only one group.
    `unmodelled`: the settings of the task that change time or memory, and that predictions do not include.
    `precision_reason`: why the precision was chosen. Empty if the spec sets it.
    """

    task: Task
    engine: Engine
    costs: Costs
    support: EngineSupport = field(default_factory=lambda: EngineSupport(support=Support.YES))
    environment: Mapping[str, str] = field(default_factory=dict)
    failure_patterns: tuple[FailurePattern, ...] = ()
    telemetry: Mapping[Device, Telemetry] = field(default_factory=dict)
    value_rules: tuple[ValueRule, ...] = ()
    knobs: tuple[Knob, ...] = ()
    engine_version: str | None = None
    conflicts: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    cores: tuple[int, ...] = ()
    setups: tuple[HostSetup, ...] = ()
    precision_reason: str = ""
    unmodelled: tuple[Unmodelled, ...] = ()

    @property
    def group_of_hosts(self) -> dict[str, int]:
        """The index of each host's node group. Empty if the spec names no hosts."""
        groups, hosts = self.task.cluster.groups, self.task.spec.cluster.hosts
        if len(groups) == 1:
            return dict.fromkeys(hosts, 0)
        return dict(zip(hosts, (index for index, group in enumerate(groups) for _ in range(group.nodes)), strict=False))

    def devices_of(self, host: str = "") -> tuple[Device, ...]:
        """Return the devices that a trial uses on `host`, or on this machine if `host` is empty.

        Usually these are the first detected devices. They are the devices that the spec's environment variables select,
        or else devices numbered from 0, if too few devices were detected, or if the spec selects devices on another
        host, where detection does not see the spec's variables.
        """
        group = self.task.cluster.groups[self.group_of_hosts.get(host, 0)]
        support, variables = self.variables_of(host)
        count = self.task.devices_on(group)
        detected = {device.selector: device for device in self.devices if device.host == host}
        listed = next((variables[name] for name in support.visible_devices if variables.get(name)), None)
        if len(detected) >= count and not (host and listed):
            names = list(detected)
        else:
            names = [word.strip() for word in listed.split(",")] if listed else [str(place) for place in range(count)]
        chip = group.chip.name
        places = enumerate(names[:count])
        return tuple(
            detected.get(name) or Device(index=place, chip=chip, host=host, name=name) for place, name in places
        )

    def setup_of(self, host: str) -> HostSetup | None:
        """Return the setup of a host's node group, or None if there is only one group."""
        return self.setups[self.group_of_hosts[host]] if self.setups and host in self.group_of_hosts else None

    def variables_of(self, host: str) -> tuple[EngineSupport, Mapping[str, str]]:
        """Return the engine support on a host's chip, and the environment variables that the spec sets on that host."""
        spec, setup = self.task.spec, self.setup_of(host)
        group_envs, host_envs = setup.envs if setup else spec.cluster.envs, spec.cluster.host_envs.get(host, {})
        return setup.support if setup else self.support, {**spec.envs, **group_envs, **host_envs}


class Probes(ABC):
    """Runs single ranks of a larger job on one device.

    The predictions of an engine with probes must have the parts `compute_s` and `optimizer_s`.
    """

    @abstractmethod
    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice, with the reason, if probes of `spec` cannot run on this machine."""

    @abstractmethod
    def predict(self, task: Task, columns: Columns, rank: int, costs: Costs, *, alone: bool = True) -> RankPrediction:
        """Return the prediction of a global rank of the candidate in `columns` (one row), `alone` or in its job."""

    @abstractmethod
    def stage_ranks(self, task: Task, columns: Columns) -> tuple[int, ...]:
        """Return the first global rank of each pipeline stage of the candidate in `columns`, which have one row."""

    @abstractmethod
    def ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the global ranks to probe, in order. They determine the memory and the time of the candidate."""

    @abstractmethod
    def launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Write the input files of a probe of one global rank to `folder`, and return its launch.

        `device`: the index of the device among this machine's devices with the same chip.
        """

    @abstractmethod
    def read(self, task: Task, folder: str) -> RankMeasurement:
        """Return the measurement of a finished probe. Raises FlagError with a line about what is missing."""


class Engine(ABC):
    """The base class of engines: the search space, the predictions and the trials of a program.

    An engine must define `name`, `kind`, `knobs`, `predict`, `launch` and `read`. All other members have defaults,
    which their docstrings state.

    Arguments named `columns` map each knob's name to an array with one element per candidate. A row is the position of
    a candidate in these arrays.
    """

    name: str
    kind: str
    """The kind of job: train, serve, or one that a distribution adds."""
    knobs: tuple[Knob, ...]
    """All knobs that specs and job records may set."""
    modules: Mapping[str, str] = {}
    """The modules that trials import, and the pip requirement of each."""
    distribution: str = ""
    """The distribution whose version is the engine's release. Empty means the distribution in `modules` whose name
    contains the engine's name."""
    untested: str = ""
    """A warning to users if the support for the engine was written from documentation only. Empty if it was tested."""
    failures: tuple[FailurePattern, ...] = ()
    """The failure patterns of this engine's logs."""
    replicas: str = ""
    """The name of the knob for the number of data-parallel replicas, if all replicas do the same work.

    Trials may then run on fewer nodes, with fewer replicas and a proportionally smaller global batch. If it is empty,
    trials run on all nodes.
    """

    # What few engines can do

    plans: Plans = Plans()
    """What plans and reports say about candidates."""
    bounds: Bounds | None = None
    """Lower bounds of time and memory."""
    commands: Commands | None = None
    """Reads users' commands."""
    probes: Probes | None = None
    """Runs single ranks."""

    # The spec

    def with_program(self, program: object) -> Engine:
        """Return the engine for a spec whose key `train.program` has the value `program`, or None if it is missing.

        The result may have other knobs. Raises SpecError for invalid data. By default, the key must be missing.
        """
        if program is not None:
            raise unsupported(self, "train.program", "remove the key")
        return self

    def check_values(self, spec: Spec) -> None:  # noqa: B027  # a default, not forgotten
        """Raise SpecError if the engine, or its release in `spec`, does not support some values. Default: no check."""

    def complete(self, platform: Platform, *, runs_here: bool, plan: bool) -> Platform:
        """Return `platform` with values for what the spec and the plugins leave open. By default unchanged.

        `plan`: whether no trial will run. Otherwise only values that trials can run are added.
        `runs_here`: whether trials could run on this machine. If not, the job is planned as production jobs on the
        chips run.

        Values in the spec take precedence. Raises SpecError for values in the spec that cannot run.
        """
        return platform

    def warnings(self, task: Task) -> Sequence[str]:
        """Return a warning for each key that affects no candidate, or contradicts another one. By default none."""
        return ()

    def unmodelled(self, task: Task) -> Sequence[Unmodelled]:
        """Return the task's settings that change time or memory and are not predicted. By default none."""
        return ()

    # The search space

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the axes of the space in the order in which they are crossed.

        By default each searchable knob has an axis, with the values in the spec, or else the values of `Knob.auto`.
        """
        return tuple(knob.axis(task.listed_values(knob, AUTO)) for knob in self.knobs if knob.searchable)

    def rules(self, task: Task, /) -> tuple[Rule, ...]:
        """Return the legality rules. By default there are none.

        Raises SpecError for settings that contradict each other.
        """
        return ()

    def merges(self, task: Task, /) -> tuple[Merge, ...]:
        """Return the merges of equivalent candidates. By default there are none."""
        return ()

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
        """Encode one candidate as one-row columns. Raises SpecError for an invalid value.

        `values`: values of some knobs. By default all other knobs have their neutral value.
        """
        columns = {}
        for axis in self.axes(task):
            value = values.get(axis.knob, axis.neutral)
            try:
                columns[axis.knob] = np.array([axis.encode(value)], dtype=np.int64)
            except (ValueError, TypeError):
                raise SpecError(key=axis.knob, value=value, problem="is not a valid value") from None
        return columns

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return a small space from which an expert would choose a candidate without measuring.

        By default it has only the neutral value of each knob.
        """
        return {knob.name: (knob.neutral,) for knob in self.knobs if knob.searchable}

    def rule_of_thumb(self, task: Task, columns: Columns, predictions: Predictions) -> int:
        """Return the row of the candidate in the usual space that an expert would choose. By default the first."""
        return 0

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        """Return rules that remove legal candidates that are not worth a trial on any chip. By default none."""
        return ()

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which of `columns` need as much memory as `candidate` or more for any model.

        By default, these are candidates that differ only by values of knobs with a `Knob.memory_order`.
        """
        return differs_only(self.knobs, columns, candidate, {knob.name: knob.memory_order for knob in self.knobs})

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which of `columns` certainly take as long as `candidate` or longer. By default none."""
        return np.zeros_like(next(iter(columns.values())), dtype=np.bool_)

    # Predictions

    @abstractmethod
    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return the predicted memory and time of each candidate.

        `columns`: may contain knobs that only job records set.
        """

    def rough(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return predictions with the memory of `predict`, for `rule_of_thumb`. Times may be less precise."""
        return self.predict(task, columns, costs)

    def sizes(self, task: Task, columns: Columns) -> Mapping[str, FloatArray]:
        """Return the sizes that determine the speed of each candidate's kernels, as logarithms to base 2.

        The errors of predictions are learned from them. There should be few, with the same meaning in all tasks. By
        default there are none.
        """
        return {}

    def published(self, task: Task, values: Mapping[str, KnobValue], notes: str) -> Published:
        """Return the job of a record with defaults filled in.

        `task`: the task with the settings in the record. `values`: the knobs in it. `notes`: free text from its source.

        Raises SpecError, or NotModelled if the engine cannot predict the record. By default it cannot.
        """
        raise unsupported(self, "job records", "write a spec for `flag estimate`")

    # Trials

    def ready(self, spec: Spec) -> None:  # noqa: B027  # a default, not forgotten
        """Raise SpecError or NoDevice, with the reason, if trials of `spec` cannot run on this machine.

        By default nothing is checked.
        """

    def trial_notes(self, platform: Platform, candidate: Candidate | None) -> Sequence[str]:
        """Return sentences for the user about how trials differ from the user's job. By default none.

        They are about this machine's software, and about changes of the user's command other than the knobs of
        `candidate`. None if trials do not run the command.
        """
        return ()

    @abstractmethod
    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Write the input files of a run to `folder` and return its launch.

        `for_real`: whether to run the user's complete job. Otherwise the launch is a trial of `control.train_iters`
        steps.
        """

    def steps(self, task: Task, folder: str) -> Steps:
        """Return the steps of a running trial. By default there are none, and trials are not stopped early."""
        return Steps()

    @abstractmethod
    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return the measurement of a finished trial.

        `partial`: whether the trial was stopped early, so that only its finished steps are read.
        Raises FlagError with a line about what is missing.
        """

    def answers(self, task: Task, change: str, folder: str, baseline: str) -> Answers | None:
        """Compare the answers of the trials in two folders. `change`: which of ANSWERS their knobs may do.

        Return None, the default, if they cannot be compared. Raises FlagError if the trial cannot count without that.
        """
        return None

    def shorter_batch(self, task: Task, candidate: Candidate, share: float) -> int | None:
        """Return a smaller global batch size for trials with shortened steps, or None, the default, if there is none.

        `share`: the minimum size relative to the task's global batch size.

        The result is the smallest legal size with this share that still fills the pipeline, so that memory reaches its
        peak. Trials read the size from `task.spec.train`, and the core scales the measured times.
        """
        return None

    # Servers

    def device_counts(self, task: Task, columns: Columns) -> IntArray:
        """Return the number of devices of each candidate, as an array. By default all devices of the cluster."""
        return np.full_like(next(iter(columns.values())), task.cluster.devices)

    def learned(self, task: Task, trials: Sequence[Trial]) -> Task:
        """Return `task` with the properties that `trials` revealed, for better predictions. By default unchanged."""
        return task

    def servers(self, platform: Platform, candidate: Candidate, name: str) -> ServerGroups | tuple[Candidate, int]:
        """Return the groups of identical servers of a candidate, for an exported job called `name`. Raises UsageError.

        If all servers are identical, return the candidate of one server, and their number: by default one.
        """
        return candidate, 1


def unsupported(engine: Engine, what: str, fix: str) -> SpecError:
    """Return the error for a spec that needs something that an engine cannot do."""
    return SpecError(key=f"{engine.kind}.engine", value=engine.name, problem=f"does not support {what}", fix=fix)


def probes_of(engine: Engine) -> Probes:
    """Return the probes of an engine. Raises SpecError if it has none."""
    if engine.probes is None:
        fix = "use auto_tuner.control.fidelity: run or estimate, without probes"
        raise unsupported(engine, "probing", fix)
    return engine.probes
