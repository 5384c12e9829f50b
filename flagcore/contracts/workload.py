"""The base class of engines, and `Platform`, which is a task with everything that plugins provide for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagcore.contracts.plugin import Costs, Telemetry
from flagcore.contracts.predictor import Predictor
from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import EngineSupport, ValueRule
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch, ServerGroups, Start
from flagcore.domain.probe import RankMeasurement
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import ImportNote, SettingValue, Spec, Task
from flagcore.domain.trial import Measurement

START_SECONDS = 300.0
"""The default of `Workload.start_seconds`. In this time, a trial imports modules, starts a process on each device,
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
    `precision_reason`: why the precision was chosen. Empty if the spec sets it.
    """

    task: Task
    workload: Workload
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


class Workload(Predictor):
    """The base class of engines.

    An engine must define `name`, `kind`, `knobs`, `predict`, `launch` and `read`. All other members have defaults,
    which their docstrings state.
    """

    modules: Mapping[str, str] = {}
    """The modules that trials import, and the pip requirement of each."""
    distribution: str = ""
    """The distribution whose version is the engine's release. Empty means the distribution in `modules` whose name
    contains the engine's name."""
    untested: str = ""
    """A warning to users if the support for the engine was written from documentation only. Empty if it was tested."""
    images: Mapping[str, Sequence[str]] = {}
    """The entry points of public container images that contain the engine. A key is a repository, optionally with the
    start of a tag, such as `example/server` or `example/server:cpu`."""
    plans_by_default: bool = False
    """Whether the plan of a model uses this engine if the user names none. If this is true for several engines, the
    first one is used."""
    start_seconds: float = START_SECONDS
    """The time limit in seconds for the start of a trial. For a server, it includes the time of the load."""

    def with_program(self, program: object) -> Workload:
        """Return the engine for a spec whose key `train.program` has the value `program`, or None if it is missing.

        The result may have other knobs. Raises SpecError for invalid data, by default for everything except None.
        """
        if program is not None:
            raise self._unsupported("train.program", "remove the key")
        return self

    # Completing a spec

    def check_values(self, spec: Spec) -> None:
        """Raise SpecError if the engine, or its release in `spec`, does not support some values. Default: no check."""

    def as_in_production(self, platform: Platform) -> Platform:
        """Return `platform` with the options that the spec leaves open set as in production jobs on the chips.

        Called for plans of jobs that cannot run on this machine. By default nothing is set.
        """
        return platform

    def assumed(self, task: Task, candidate: Candidate) -> Mapping[str, SettingValue]:
        """Return those settings that `as_in_production` set and that are legal with `candidate`. By default none."""
        return {}

    def runs_as(self, spec: Spec) -> str:
        """Return how the engine runs a training job without a command, for plans. By default empty: plans name it."""
        return ""

    def as_installed(self, platform: Platform) -> Platform:
        """Return `platform` with the options that the spec leaves open set to the defaults of this machine's software.

        By default nothing is set.
        """
        return platform

    def installation_notes(self, platform: Platform) -> Sequence[str]:
        """Return sentences for the user about how this machine's software affects trials. By default none."""
        return ()

    derived_knobs: Collection[str] = ()
    """The knobs whose values the engine derives from costs. They exist only on clusters with several node groups."""

    def with_derived_values(self, platform: Platform, *, plan: bool = True) -> Platform:
        """Return the platform with the derived values of `derived_knobs` added to the task's space.

        `plan`: whether no trial will run. Otherwise only values that trials can run are added.

        Values in the spec take precedence. Raises SpecError for values in the spec that cannot run. By default no
        values are derived.
        """
        return platform

    def values_alone(self, task: Task, group: int) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the values to search, by knob, if the job runs only on the node group with index `group`.

        `task`: a task with derived values in its space.

        Knobs that are not returned may have any value. By default none are returned.
        """
        return {}

    def spec_warnings(self, spec: Spec) -> Sequence[str]:
        """Return a warning for each key of the spec that affects no candidate of the space. By default none."""
        return ()

    def task_warnings(self, task: Task) -> Sequence[str]:
        """Return a warning for each difference between the user's command and the baseline of a task, or its devices.

        By default none.
        """
        return ()

    # Trials

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice, with the reason, if trials of `spec` cannot run on this machine.

        By default nothing is checked.
        """

    @abstractmethod
    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        """Write the input files of a run to `folder` and return its launch.

        `for_real`: whether to run the user's complete job. Otherwise the launch is a trial of `control.train_iters`
        steps.
        """

    def progress(self, task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
        """Return a function that returns the time of each finished step of a running trial in seconds, including
        warm-up.

        The function is called about twice a second, so it should read only what was added to the log since the last
        call. By default it returns no steps, and trials are not stopped early.
        """
        return tuple

    @abstractmethod
    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        """Return the measurement of a finished trial.

        `partial`: whether the trial was stopped early, so that only its finished steps are read.
        Raises FlagError with a line about what is missing.
        """

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return the failure patterns of this engine's logs. By default none."""
        return ()

    def command_changes(self, platform: Platform, candidate: Candidate) -> Sequence[str]:
        """Return a line for each change that a trial makes to the user's command, apart from the candidate's knobs.

        By default there are none.
        """
        return ()

    def step_limit(self, task: Task) -> int | None:
        """Return the number of steps after which a trial is stopped and read.

        Returns None, the default, if the program ends by itself.
        """
        return None

    def shorter_batch(self, task: Task, candidate: Candidate, share: float) -> int | None:
        """Return a smaller global batch size for trials with shortened steps, or None, the default, if there is none.

        `share`: the minimum size relative to the task's global batch size.

        The result is the smallest legal size with this share that still fills the pipeline, so that memory reaches its
        peak. Trials read the size from `task.spec.train`, and the core scales the measured times.
        """
        return None

    replicas: str = ""
    """The name of the knob for the number of data-parallel replicas, if all replicas do the same work.

    Trials may then run on fewer nodes, with fewer replicas and a proportionally smaller global batch. If it is empty,
    trials run on all nodes.
    """

    # Probes, which run single ranks of a larger job on one device

    work_parts: Collection[str] = ()
    """The parts of a step in which a pipeline stage computes, including `compute_s`. The part `pp_bubble_s` is
    proportional to the sum of these parts.

    The predictions of an engine with probes must also have the part `optimizer_s`.
    """

    def ready_to_probe(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice, with the reason, if probes of `spec` cannot run on this machine.

        By default the engine does not support probes, and the following methods are not called.
        """
        raise self._unsupported_probes()

    def probe_ranks(self, task: Task, candidate: Candidate, costs: Costs) -> tuple[int, ...]:
        """Return the global ranks to probe, in order. They determine the memory and the time of the candidate."""
        raise self._unsupported_probes()

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        """Write the input files of a probe of one global rank to `folder`, and return its launch.

        `device`: the index of the device among this machine's devices with the same chip.
        """
        raise self._unsupported_probes()

    def read_probe(self, task: Task, folder: str) -> RankMeasurement:
        """Return the measurement of a finished probe. Raises FlagError with a line about what is missing."""
        raise self._unsupported_probes()

    # Commands, job records and exports. Engines that also implement `flagcore.contracts.Exporter` have more targets.

    def starts(self, command: Sequence[str], directory: str) -> bool:
        """Return whether a command starts the engine's program. Wrapping shells and containers were already removed.

        By default False.
        """
        return False

    def role(self, command: Sequence[str]) -> str:
        """Return `prefill` or `decode` if a command starts a server that does only that; by default an empty text."""
        return ""

    def read_command(
        self, start: Start, directory: Path, model: str | None
    ) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        """Convert a launch command, or a script that runs one, to the data of a spec. Also return notes.

        The arguments of the command become the baseline. The notes name each argument that is dropped or has another
        meaning in the spec.

        `directory`: the working directory of the command.
        `model`: the path of the model. None means the model that the command names.
        `start`: the command with its environment, devices and script. Raises SpecError, by default always.
        """
        raise self._unsupported("the import of commands", "write a spec")

    def read_flags(self, text: str, spec: Spec) -> tuple[str, Mapping[str, SettingValue], Sequence[str]]:
        """Return the knobs in the engine's flags of a candidate, the settings in them, and the unused flags."""
        return text, {}, ()

    def published(
        self, task: Task, values: Mapping[str, KnobValue], notes: str
    ) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
        """Return the task and the knobs of a job record with defaults filled in, and the settings found in `notes`.

        A job record describes a published run, and `notes` is free text from its source. The legality rules named after
        these settings are not applied, because the job did run.

        Raises SpecError, by default always, or NotModelled if the engine cannot predict the record.
        """
        raise self._unsupported("job records", "write a spec for `flag estimate`")

    def job_warnings(
        self, task: Task, values: Mapping[str, KnobValue], settings: Mapping[str, SettingValue], noted: Collection[str]
    ) -> Sequence[str]:
        """Return a warning for each key of a job record that has no effect or was filled in. By default none.

        `task`, `values`, `noted`: the results of `published`.
        `settings`: the settings in the record.
        """
        return ()

    def groups(self, platform: Platform, candidate: Candidate, name: str) -> ServerGroups | None:
        """Return the groups of identical servers of a candidate, for an exported job called `name`. Raises UsageError.

        Returns None, the default, if all servers are identical.
        """
        return None

    def replica(self, candidate: Candidate) -> tuple[Candidate, int]:
        """Return the candidate of a single server, and the number of servers.

        By default the candidate is one server. Raises UsageError if the servers differ.
        """
        return candidate, 1
