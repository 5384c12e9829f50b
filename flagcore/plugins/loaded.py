"""The hooks as typed methods over the plugins that loaded. Each plugin is called in its own try."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from flagcore.contracts import CollectiveCosts, MemoryModel, PruningRule, Telemetry
from flagcore.domain.chip import Chip, Device, Support, normalize_name
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.maturity import Maturity
from flagcore.domain.spec import Task
from flagcore.errors import UsageError
from flagcore.physics.collectives.costs import Collectives
from flagcore.physics.collectives.topology import topology_of
from flagcore.physics.cost_stack import ROOFLINE, CollectiveCostStack, KernelCostStack
from flagcore.physics.kernels.roofline import Roofline
from flagcore.plugins import validation
from flagcore.plugins.entry_points import kind_of
from flagcore.plugins.installed import (
    BadPlugin,
    Clash,
    PluginFailure,
    capture_warnings,
    installed,
    load_only,
    one_line,
    origin,
    origins,
    stdout_to_stderr,
)
from flagcore.plugins.loader import Plugin, make_plugin
from flagcore.plugins.plugin_proxy import plugin_name, wrap_objects

GROUP = "flagcore.plugins"
DISABLE_VARIABLE = "FLAGCORE_DISABLE_PLUGINS"

T = TypeVar("T")


class _Failed(Exception):
    """A plugin could not answer."""

    def __init__(self, failure: PluginFailure) -> None:
        self.failure = failure
        super().__init__(str(failure))


class LoadedPlugins:
    """`flagcore.contracts.Plugins` over real plugins. A plugin's error never raises, except in `prepare_launch`.

    `failures` grows as plugins are called.
    """

    def __init__(self, plugins: Iterable[Plugin], failures: Iterable[PluginFailure] = ()) -> None:
        self.plugins = tuple(sorted(plugins, key=lambda plugin: plugin.name))
        self._failures = dict.fromkeys(failures)
        self._devices: tuple[Device, ...] | None = None
        self._telemetry: Callable[[Device], Telemetry | None] | None = None
        self._undetected: dict[str, str] = {}
        self._catalogue: dict[str, tuple[Chip, str]] | None = None
        self._chips: list[Chip] = []

    @classmethod
    def of(cls, plugins: Mapping[str, object]) -> LoadedPlugins:
        """Take modules or objects as plugins by name, without any installed distribution."""
        made, failures = [], []
        for name, module in plugins.items():
            try:
                made.append(make_plugin(name, module))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failures.append(PluginFailure(name=name, distribution="", stage="check", reason=one_line(error)))
        return cls(made, failures)

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """All failures so far, each once."""
        return tuple(self._failures)

    def find_chip(self, name: str) -> Chip | None:
        """Return the chip of that name or alias; letter case, spaces and dashes do not matter."""
        chip, _ = self._known_chips().get(normalize_name(name), (None, ""))
        return chip

    def owner(self, chip: str) -> str | None:
        """Return the name of the plugin that catalogues `chip` (name or alias)."""
        return self._known_chips().get(normalize_name(chip), (None, None))[1]

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that all plugins found. Asked once."""
        if self._devices is None:
            self._devices = tuple(device for plugin in self.plugins for device in self._devices_of(plugin))
        return self._devices

    def use_devices(self, devices: tuple[Device, ...], telemetry: Callable[[Device], Telemetry | None]) -> None:
        """Take these devices, which are on other hosts, for those that plugins found, and read them by `telemetry`."""
        self._devices, self._telemetry = devices, telemetry

    def detection_failures(self) -> Mapping[str, str]:
        """Return, by plugin, why it found no device though something of it is here: its warnings, or its failure."""
        self.devices()
        return self._undetected

    def _devices_of(self, plugin: Plugin) -> tuple[Device, ...]:
        with capture_warnings() as messages:
            try:
                found = self._try(plugin, "flagcore_devices", validation.several(Device)) or ()
            except _Failed as failed:
                found, messages = (), [failed.failure.reason]
        if messages and not found:
            self._undetected[plugin.name] = "; ".join(messages)
        return found

    def chips(self) -> tuple[Chip, ...]:
        """Return all chips. Asked once. Of two chips with one name or alias, the first plugin's counts."""
        self._known_chips()
        return tuple(self._chips)

    def vendor(self, environment: Mapping[str, str]) -> str | None:
        """Return the vendor that variables of a job ask for: the first plugin's answer."""
        answers = (
            self._ask(plugin, "flagcore_vendor", validation.one(str), environment=environment)
            for plugin in self.plugins
        )
        return next((answer for answer in answers if answer), None)

    def maturity(self, plugin: Plugin) -> Maturity | None:
        return self._ask(plugin, "flagcore_maturity", validation.one(Maturity))

    def topology(self, group: NodeGroup) -> Topology | None:
        """Return the first plugin's answer, or None to derive the levels from the chip."""
        return self._first(
            [group.chip], "flagcore_topology", lambda answer: validation.topology(answer, group), group=group
        )

    def memory_model(self, group: NodeGroup, engine: str) -> MemoryModel | None:
        about = {"group": group, "engine": engine, "kind": kind_of(engine)}
        return self._first([group.chip], "flagcore_memory_model", validation.memory_model, **about)

    def kernel_costs(self, chip: Chip, engine: str) -> KernelCostStack | None:
        """Return the first plugin's costs and the roofline below them; None if no plugin has any."""
        about = {"chip": chip, "engine": engine, "kind": kind_of(engine)}
        table = self._first([chip], "flagcore_kernel_costs", validation.kernel_costs, **about)
        if table is None:
            return None
        return KernelCostStack(((f"plugin {plugin_name(table)}", table), (ROOFLINE, Roofline(chip=chip))))

    def collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | None:
        """Return the first plugin's answer, with the topology's where that is NaN; None for the topology alone."""
        levels = self.topology(group) or topology_of(group)

        def check(answer: object) -> CollectiveCosts:
            return validation.collective_costs(answer, levels)

        found = self._first([group.chip], "flagcore_collective_costs", check, group=group, engine=engine)
        return None if found is None else CollectiveCostStack((found, Collectives(topology=levels)))

    def environment(
        self, chip: Chip, engine: str, engine_version: str | None = None, task: Task | None = None
    ) -> Mapping[str, str]:
        """Return all plugins' variables; where several set one, the plugin asked first wins."""
        joined: dict[str, str] = {}
        about = {"chip": chip, "engine": engine, "engine_version": engine_version, "kind": kind_of(engine)}
        for found in self._all([chip], "flagcore_environment", validation.environment, task=task, **about):
            joined = {**found, **joined}
        return joined

    def knobs(self, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[Knob, ...]:
        """Return all plugins' knobs; where several have one of a name, that of the plugin asked first."""
        about = {"chip": chip, "engine": engine, "engine_version": engine_version}
        found = [knob for knobs in self._all([chip], "flagcore_knobs", validation.knobs, **about) for knob in knobs]
        return tuple({knob.name: knob for knob in reversed(found)}.values())[::-1]

    def knobs_on_any_chip(self, engine: str) -> tuple[Knob, ...]:
        """Return the knobs that plugins add to `engine` on any chip, sorted by name, one for each name."""
        found = {knob.name: knob for chip in self.chips() for knob in self.knobs(chip, engine)}
        return tuple(found[name] for name in sorted(found))

    def engine_support(self, chip: Chip, engine: str, engine_version: str | None = None) -> EngineSupport:
        """Return the first plugin's answer; UNKNOWN if there is none."""
        about = {"chip": chip, "engine": engine, "engine_version": engine_version, "kind": kind_of(engine)}
        found = self._first([chip], "flagcore_engine_support", validation.one(EngineSupport), **about)
        return found or EngineSupport(support=Support.UNKNOWN, reason=f"no plugin supports {engine} on {chip.name}")

    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]:
        chips = [group.chip for group in task.cluster.groups]
        found = self._all(chips, "flagcore_pruning_rules", validation.pruning_rules, task=task)
        return tuple(rule for rules in found for rule in rules)

    def prepare_launch(self, launch: Launch, task: Task) -> Launch:
        """Return `launch` as the plugins want it, the chip's own plugin first, so that an add-on has the last word.

        Raises UsageError if a plugin could not do its part: the trial would not be what it should be.
        """
        for plugin in reversed(self._order([group.chip for group in task.cluster.groups])):
            try:
                changed = self._try(plugin, "flagcore_prepare_launch", validation.one(Launch), launch=launch, task=task)
            except _Failed as failed:
                raise UsageError(str(failed.failure)) from failed
            launch = changed or launch
        return launch

    def failure_patterns(
        self, chip: Chip, engine: str, engine_version: str | None = None
    ) -> tuple[FailurePattern, ...]:
        """Return all plugins' patterns, the chip's own plugin's last."""
        about = {"chip": chip, "engine": engine, "engine_version": engine_version}
        found = self._all([chip], "flagcore_failure_patterns", validation.failure_patterns, **about)
        return tuple(pattern for patterns in found for pattern in patterns)

    def telemetry(self, device: Device) -> Telemetry | None:
        if self._telemetry:
            return self._telemetry(device)
        chip = self.find_chip(device.chip)
        return self._first([chip] if chip else [], "flagcore_telemetry", validation.telemetry, device=device)

    def _known_chips(self) -> dict[str, tuple[Chip, str]]:
        """Return chip and plugin by every spelling of name and aliases."""
        if self._catalogue is None:
            self._catalogue = {}
            for plugin in self.plugins:
                for chip in self._ask(plugin, "flagcore_chips", validation.several(Chip)) or ():
                    self._enter(plugin, chip, self._catalogue)
        return self._catalogue

    def _enter(self, plugin: Plugin, chip: Chip, catalogue: dict[str, tuple[Chip, str]]) -> None:
        for name in (chip.name, *chip.aliases):
            if normalize_name(name) in catalogue:
                first, owner = catalogue[normalize_name(name)]
                reason = f"chip {chip.name} answers to {name}, but so does {first.name} of plugin {owner}, which wins"
                self._fail(plugin, "answer", "flagcore_chips", reason)
                return
        catalogue.update(dict.fromkeys(chip.spellings, (chip, plugin.name)))
        self._chips.append(chip)

    def _order(self, chips: Iterable[Chip]) -> list[Plugin]:
        """Return the plugins by name, those that catalogue one of `chips` last."""
        owners = {self.owner(chip.name) for chip in chips}
        return sorted(self.plugins, key=lambda plugin: (plugin.name in owners, plugin.name))

    def _first(self, chips: Iterable[Chip], hook: str, check: Callable[[object], T], **arguments: object) -> T | None:
        return next(self._all(chips, hook, check, **arguments), None)

    def _all(self, chips: Iterable[Chip], hook: str, check: Callable[[object], T], **arguments: object) -> Iterator[T]:
        for plugin in self._order(chips):
            answer = self._ask(plugin, hook, check, **arguments)
            if answer is not None:
                yield answer

    def _ask(self, plugin: Plugin, hook: str, check: Callable[[object], T], **arguments: object) -> T | None:
        try:
            return self._try(plugin, hook, check, **arguments)
        except _Failed:
            return None

    def _try(self, plugin: Plugin, hook: str, check: Callable[[object], T], **arguments: object) -> T | None:
        """Ask one plugin and check its answer. Raises _Failed, after recording the failure, and KeyboardInterrupt."""
        stage = "ask"
        try:
            with stdout_to_stderr():
                answer = plugin.ask(hook, arguments)
                stage = "answer"
                return None if answer is None else wrap_objects(plugin.name, hook, check(answer))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _Failed(self._fail(plugin, stage, hook, one_line(error))) from error

    def _fail(self, plugin: Plugin, stage: str, hook: str, reason: str) -> PluginFailure:
        failure = PluginFailure(
            name=plugin.name, distribution=plugin.distribution, stage=stage, hook=hook, reason=reason
        )
        self._failures[failure] = None
        return failure


def load_plugins(disabled: Collection[str] = ()) -> LoadedPlugins:
    """Load every installed plugin except those named in `disabled` or in FLAGCORE_DISABLE_PLUGINS (by commas)."""
    found = installed(GROUP)
    off = {*disabled, *os.environ.get(DISABLE_VARIABLE, "").split(",")}
    off = {name.strip() for name in off} - {""}
    failures = [*found.skipped_files, *(_unknown(name, found.points) for name in sorted(off - set(found.points)))]
    plugins = []
    for name in sorted(set(found.points) - off):
        points = found.points[name]
        stage = "load"
        try:
            hooks = load_only(points)
            stage = "check"
            plugins.append(make_plugin(name, hooks, origin(points[0])))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, BadPlugin):
                stage = "discover" if isinstance(error, Clash) else "check"
            reason = one_line(error)
            failures.append(PluginFailure(name=name, distribution=origins(points), stage=stage, reason=reason))
    return LoadedPlugins(plugins, failures)


def _unknown(name: str, known: Collection[str]) -> PluginFailure:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"installed are {', '.join(sorted(known)) or 'none'}"
    reason = f"cannot be disabled: no plugin has this name; {hint}"
    return PluginFailure(name=name, distribution="", stage="disable", reason=reason)
