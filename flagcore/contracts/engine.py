"""The base class of engines, and `Platform`, which is a task with everything that plugins provide for it.

What only some engines can do is in `flagcore.contracts.capabilities`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flagcore.contracts.plugin import Costs, Telemetry
from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import EngineSupport, Unmodelled, ValueRule
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, Candidate, Columns, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import AUTO, Spec, Task
from flagcore.domain.trial import Measurement
from flagcore.errors import SpecError

START_SECONDS = 300.0
"""The default of `Engine.start_seconds`. In this time, a trial imports modules, starts a process on each device,
builds the model and runs the first step. Chosen by hand."""


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
    trains_depths: bool = True
    """Whether it trains the depths of multi-token prediction that the files of a model have."""
    modules: Mapping[str, str] = {}
    """The modules that trials import, and the pip requirement of each."""
    distribution: str = ""
    """The distribution whose version is the engine's release. Empty means the distribution in `modules` whose name
    contains the engine's name."""
    untested: str = ""
    """A warning to users if the support for the engine was written from documentation only. Empty if it was tested."""
    plans_by_default: bool = False
    """Whether the plan of a model uses this engine if the user names none. If this is true for several engines, the
    first one is used."""
    start_seconds: float = START_SECONDS
    """The time limit in seconds for the start of a trial. For a server, it includes the time of the load. 0: the engine
    predicts only, and `ready` says so."""

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

    # Predictions

    @abstractmethod
    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return the predicted memory and time of each candidate.

        `columns`: may contain knobs that only job records set.
        """

    # Trials

    def ready(self, spec: Spec) -> None:  # noqa: B027  # a default, not forgotten
        """Raise SpecError or NoDevice, with the reason, if trials of `spec` cannot run on this machine.

        By default nothing is checked.
        """

    @abstractmethod
    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Write the input files of a run to `folder` and return its launch.

        `for_real`: whether to run the user's complete job. Otherwise the launch is a trial of `control.train_iters`
        steps.
        """

    @abstractmethod
    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return the measurement of a finished trial.

        `partial`: whether the trial was stopped early, so that only its finished steps are read.
        Raises FlagError with a line about what is missing.
        """

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return the failure patterns of this engine's logs. By default none."""
        return ()

    def unsupported(self, what: str, fix: str) -> SpecError:
        """Return the error for a spec that needs something that the engine cannot do."""
        return SpecError(key=f"{self.kind}.engine", value=self.name, problem=f"does not support {what}", fix=fix)
