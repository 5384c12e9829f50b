"""Loads the installed plugins, and offers their hooks as typed methods. A failing plugin does not affect others.

Each plugin has its own pluggy manager, and the objects that it returns are wrapped, so that its errors include its name
and do not affect other plugins.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from itertools import accumulate
from threading import current_thread
from typing import Any, TypeVar, cast

from flagcore.contracts import CollectiveCosts, Costs, KernelCosts, MemoryModel, Telemetry
from flagcore.domain.chip import ASSUMED_NETWORK, Chip, Device, Support, normalize_name
from flagcore.domain.cluster import Cluster, NodeGroup, Topology
from flagcore.domain.engine import EngineSupport, TaskAdvice, Unmodelled, has_common_library
from flagcore.domain.knob import Knob
from flagcore.domain.spec import Task
from flagcore.i18n import closest
from flagcore.loading.entry_points import PluginFailure, installed, one_line, origins, stdout_to_stderr, subclass_of
from flagcore.loading.limits import HOOK_SECONDS, SLOW_HOOK_SECONDS, THREAD, BadPlugin, TooSlow, together, within
from flagcore.physics.collective_costs import Collectives, between_groups, topology_of
from flagcore.physics.roofline import CollectiveCostStack, KernelCostStack, PlainMemory, Roofline, with_slowdown
from flagcore.plugins import validation
from flagcore.plugins.entry_points import OVERLAYS, capture_warnings, kind_of, kinds, load_only
from flagcore.plugins.plugin import HOOKS_WITH_OBJECTS, SLOW_HOOKS, SLOW_SECONDS, Plugin, PluginProxy, make_plugin

LOG = logging.getLogger(__name__)
UNMEASURED_RUN_SLOWDOWN = 1.15
"""The factor by which a run is slower than the core's roofline on a chip without measurements. Each published source
gives a median ratio of measured to predicted times without fitted curves (0.94 to 1.7). This is the median over the
sources."""
FEW_NAMES = 3
"""After more names of chips than these, all chips are read. A choice."""
GROUP = "flagcore.plugins"
DISABLE_VARIABLE = "FLAGCORE_DISABLE_PLUGINS"

T = TypeVar("T")


class LoadedPlugins:
    """The loaded plugins' hooks as typed methods. Exceptions and invalid results are recorded in `failures`."""

    def __init__(self, found: Iterable[Plugin | PluginFailure]) -> None:
        sorted_plugins = sorted(found, key=lambda plugin: plugin.name)
        self.plugins = tuple(plugin for plugin in sorted_plugins if isinstance(plugin, Plugin))
        self._failures = dict.fromkeys(failure for failure in sorted_plugins if isinstance(failure, PluginFailure))
        self._devices: dict[Hashable, tuple[Device, ...]] = {}
        self._of_hosts: tuple[Device, ...] | None = None
        self._telemetry: Callable[[Device], Telemetry | None] | None = None
        self._detection_failures: dict[str, str] = {}
        self._finders: dict[Device, str] = {}
        self._too_slow: set[str] = set()
        self._costs_of_parts: dict[str, Costs] = {}
        self._catalogues: dict[str, dict[str, tuple[Chip, str]]] = {}

    @classmethod
    def of(cls, plugins: Mapping[str, object]) -> LoadedPlugins:
        """Return the plugins that the given modules or objects implement, by name, instead of the installed ones."""
        return cls(_plugin(name, partial(lambda module: module, module)) for name, module in plugins.items())

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """All failures of plugins so far, without duplicates."""
        return tuple(self._failures)

    def find_chip(self, name: str) -> Chip | None:
        """Return the chip with this name or alias, or None. Letter case, spaces and dashes are ignored."""
        return self._catalogue(normalize_name(name)).get(normalize_name(name), (None, ""))[0]

    def measured_chip(self, chip: Chip) -> Chip:
        """Return `chip` with figures that a plugin measured on this machine, if any."""
        found = self._first([chip], "flagcore_measured_chip", validation.one(Chip), chip=chip)
        return found if found is not None and found.name == chip.name else chip

    def owner(self, chip: str) -> str | None:
        """Return the name of the plugin that defines `chip` (a name or an alias), or None if there is none."""
        return self._catalogue(normalize_name(chip)).get(normalize_name(chip), (None, None))[1]

    def devices(self, variables: Mapping[str, str] | None = None, chips: Sequence[Chip] = ()) -> tuple[Device, ...]:
        """Return the devices that all plugins find, or at least those that are `chips`. Results are cached.

        `variables`: environment variables of the spec. The devices are those that processes with these variables and
        the variables of this shell can use.
        """
        if self._of_hosts is not None:
            return self._of_hosts
        owners = {self.owner(chip.name) for chip in chips}
        asked = tuple(plugin for plugin in self.plugins if plugin.name in owners)
        asked = asked if 0 < len(asked) == len(owners) else self.plugins  # a chip may be known from a calibration only
        key = asked, *sorted((variables or {}).items())
        if key not in self._devices:
            environment = {**os.environ, **(variables or {})}
            with stdout_to_stderr():  # together, because tools may hang
                found = together([partial(self._devices_of, plugin, environment) for plugin in asked])
            self._devices[key] = tuple(device for devices in found for device in devices)
        return self._devices[key]

    def finder(self, device: Device) -> str | None:
        """Return the name of the plugin that found `device`, or None."""
        return self._finders.get(device)

    def use_devices(self, devices: tuple[Device, ...], telemetry: Callable[[Device], Telemetry | None]) -> None:
        """Use other hosts' `devices` instead of those here. `telemetry`: returns the reader of a device."""
        self._of_hosts, self._telemetry = devices, telemetry

    def detection_failures(self) -> Mapping[str, str]:
        """Return the warnings, or the reason of failure, of each plugin that found no device."""
        self.devices()
        return self._detection_failures

    def _devices_of(self, plugin: Plugin, environment: Mapping[str, str]) -> tuple[Device, ...]:
        before = {*self._failures}
        with capture_warnings() as messages:
            found = self._call(plugin, "flagcore_devices", validation.several(Device), environment=environment) or ()
        own = (each for each in self.failures if each.name == plugin.name and each not in before)
        reasons = [failure.reason for failure in own] or messages
        if reasons and not found:
            self._detection_failures[plugin.name] = "; ".join(reasons)
        self._finders.update(dict.fromkeys(found, plugin.name))
        return found

    def chips(self, name: str = "") -> tuple[Chip, ...]:
        """Return all chips, or at least those with this (family) name. The second of two with the same is ignored."""
        return tuple({chip.name: chip for chip, _ in self._catalogue(normalize_name(name)).values()}.values())

    def published_runs(self) -> tuple[Mapping[str, Any], ...]:
        """Return the published runs of all plugins as job records."""
        found = self._all((), "flagcore_published_runs", validation.several(dict))
        return tuple(record for records in found for record in records)

    def vendor(self, environment: Mapping[str, str]) -> str | None:
        """Return the vendor that a job's environment variables select: the first plugin's result, or None."""
        results = self._all((), "flagcore_vendor", validation.one(str), environment=environment)
        return next((result for result in results if result), None)

    def health(self, chip: Chip) -> tuple[str, ...]:
        """Return the problems of this machine's software for `chip`, collected from all plugins."""
        found = self._all([chip], "flagcore_health", validation.several(str), chip=chip)
        return tuple(sentence for sentences in found for sentence in sentences)

    def topology(self, group: NodeGroup) -> Topology | None:
        """Return the topology of the first plugin that returns one, or None. The core then derives it from the chip."""
        return self._first([group.chip], "flagcore_topology", partial(validation.topology, group=group), group=group)

    def memory_model(self, group: NodeGroup, engine: str) -> MemoryModel | None:
        arguments = {"group": group, "engine": engine, "kind": kind_of(engine)}
        return self._first([group.chip], "flagcore_memory_model", validation.memory_model, **arguments)

    def kernel_costs(self, chip: Chip, engine: str) -> KernelCostStack | None:
        """Return the first plugin's kernel costs, or None; the roofline has times that it does not know."""
        arguments = {"chip": chip, "engine": engine, "kind": kind_of(engine)}
        costs = self._first([chip], "flagcore_kernel_costs", validation.kernel_costs, **arguments)
        return None if costs is None else KernelCostStack((costs, Roofline(chip=chip)))

    def collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | None:
        """Return the first plugin's collective costs, or None; the topology gives times that it does not know."""
        levels = self.topology(group) or topology_of(group)

        check = partial(validation.collective_costs, topology=levels)
        costs = self._first([group.chip], "flagcore_collective_costs", check, group=group, engine=engine)
        return None if costs is None else CollectiveCostStack((costs, Collectives(topology=levels)))

    def costs(self, cluster: Cluster, engine: str, engine_version: str | None = None) -> Costs:
        """Return the cost models for `cluster`. The core provides those that no plugin has."""
        supports = [self.engine_support(group.chip, engine, engine_version) for group in cluster.groups]
        costs_of_groups = [self._costs_of(*each, engine) for each in zip(cluster.groups, supports, strict=True)]
        first, *others = costs_of_groups
        if not others:
            return first
        starts = accumulate(group.devices for group in cluster.groups)
        networks = []
        for group in cluster.groups:  # a group within one link domain is enlarged, so that it has a network level
            extended = replace(group, nodes=max(group.nodes, group.link_domain // group.devices_per_node + 1))
            networks.append((self.topology(extended) or topology_of(extended)).levels[-1])
        is_direct = has_common_library(cluster.groups, supports)
        between = between_groups(networks, () if is_direct else [each.kernels for each in costs_of_groups])
        return replace(first, further=dict(zip(starts, others, strict=False)), between=between)

    def _costs_of(self, group: NodeGroup, support: EngineSupport, engine: str) -> Costs:
        """Return the cost models of one node group. The core provides those that no plugin has."""
        kernels = self.kernel_costs(group.chip, engine)
        synchronous = support.shared_devices
        run_slowdown = UNMEASURED_RUN_SLOWDOWN if kernels is None else kernels.run_slowdown()
        used_kernels: KernelCosts = kernels or Roofline(chip=group.chip)
        ranks_per_core = max(1.0, group.devices_per_node / group.chip.devices_per_node) if synchronous else 1.0
        slowdown = ranks_per_core / group.speed
        if slowdown != 1.0:
            used_kernels = with_slowdown(used_kernels, slowdown, launches=slowdown if synchronous else 1.0)
        job = kinds().get(kind_of(engine))
        return Costs(
            memory=self.memory_model(group, engine) or PlainMemory.of(group),
            kernels=used_kernels,
            collectives=self.collective_costs(group, engine)
            or Collectives(topology=self.topology(group) or topology_of(group)),
            guessed=kernels is None or (support.support is Support.UNKNOWN and job is not None and not job.has_steps),
            assumed_network=group.chip.nic_bytes_per_second == ASSUMED_NETWORK,
            synchronous=synchronous,
            overheads=support.overheads,
            run_slowdown=1.0 if synchronous else run_slowdown,
            others=self._costs_of_part,
        )

    def _costs_of_part(self, cluster: Cluster, engine: str) -> Costs:
        """Return the costs of an engine that does a part of a task. They are computed once."""
        key = repr((cluster, engine))
        if key not in self._costs_of_parts:
            self._costs_of_parts[key] = self.costs(cluster, engine)
        return self._costs_of_parts[key]

    def environment(
        self, chip: Chip, engine: str, engine_version: str | None = None, task: Task | None = None
    ) -> Mapping[str, str]:
        """Return the environment variables of all plugins. If several plugins set one, the first value is used."""
        environment: dict[str, str] = {}
        arguments = {"chip": chip, "engine": engine, "engine_version": engine_version, "kind": kind_of(engine)}
        for variables in self._all([chip], "flagcore_environment", validation.environment, task=task, **arguments):
            environment = {**variables, **environment}
        return environment

    def knobs(self, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[Knob, ...]:
        """Return the knobs of all plugins. If several knobs have the same name, the first is used."""
        about = {"chip": chip, "engine": engine, "engine_version": engine_version}
        all_knobs = [knob for knobs in self._all([chip], "flagcore_knobs", validation.knobs, **about) for knob in knobs]
        return tuple({knob.name: knob for knob in reversed(all_knobs)}.values())[::-1]

    def knobs_on_any_chip(self, engine: str) -> tuple[Knob, ...]:
        """Return the knobs that plugins add to `engine` on at least one chip, one per name, sorted by name."""
        knob_by_name = {knob.name: knob for chip in self.chips() for knob in self.knobs(chip, engine)}
        return tuple(knob_by_name[name] for name in sorted(knob_by_name))

    def engine_support(self, chip: Chip, engine: str, engine_version: str | None = None) -> EngineSupport:
        """Return the engine support of the first plugin that returns one, or else support that is UNKNOWN."""
        arguments = {"chip": chip, "engine": engine, "engine_version": engine_version, "kind": kind_of(engine)}
        support = self._first([chip], "flagcore_engine_support", validation.one(EngineSupport), **arguments)
        return support or EngineSupport(support=Support.UNKNOWN, reason=f"no plugin supports {engine} on {chip.name}")

    def check_task(self, task: Task, engine_version: str | None = None) -> TaskAdvice:
        """Return the joined advice of all plugins. The advice of the chip's plugin is last."""
        chips, about = [group.chip for group in task.cluster.groups], {"task": task, "engine_version": engine_version}
        advice = list(self._all(chips, "flagcore_check_task", validation.task_advice, **about))
        return TaskAdvice(
            rules=tuple(dict.fromkeys(rule for each in advice for rule in each.rules)),
            impossible=next((each.impossible for each in advice if each.impossible), ""),
            preferred=tuple(preferred for each in advice for preferred in each.preferred),
            warmup=max((each.warmup for each in advice), default=0),
            failures=tuple(pattern for each in advice for pattern in each.failures),
            notes=tuple(note for each in advice for note in each.notes),
            unmodelled=tuple(dict.fromkeys(setting for each in advice for setting in each.unmodelled)),
            harmless=tuple(name for each in advice for name in each.harmless),
        )

    def unmodelled(self, task: Task) -> Iterable[Unmodelled]:
        """Return the settings that predictions leave out on all engines: keys of models, variables of common software.

        This method, `maturity`, `unlisted_chip` and `kept` are for an overlay (`flagcore.plugins.with_overlay`).
        """
        return ()

    def maturity(self, plugin: Plugin) -> Mapping[str, Any] | None:
        """Return the evidence for the data of a plugin, with its strongest kind as `word`. None if it is unknown."""
        return None

    def unlisted_chip(self) -> tuple[Chip, EngineSupport, tuple[Device, ...]] | None:
        """Return this machine's unlisted chip, support and devices, or None. Raises NoDevice if not measurable."""
        return None

    def kept(self, compute: Callable[[], T], about: Iterable[object]) -> T:
        """Return the result of `compute`, which depends on `about`, the plugins and the engine. May be kept."""
        return compute()

    def telemetry(self, device: Device) -> Telemetry | None:
        if self._telemetry:
            return self._telemetry(device)
        chip = self.find_chip(device.chip)
        check: Callable[[object], Telemetry] = partial(validation.check_protocol, Telemetry)
        return self._first([chip] if chip else [], "flagcore_telemetry", check, device=device)

    def _catalogue(self, name: str) -> dict[str, tuple[Chip, str]]:
        """Each chip, or at least those with a normalized `name`, by all its spellings, with the name of its plugin."""
        name = "" if "" in self._catalogues or len(self._catalogues) > FEW_NAMES else name
        known = name in self._catalogues
        catalogue = self._catalogues.setdefault(name, {})
        for plugin in () if known else self.plugins:
            for chip in self._call(plugin, "flagcore_chips", validation.several(Chip), name=name) or ():
                self._add_chip(plugin, chip, catalogue)
        return catalogue

    def _add_chip(self, plugin: Plugin, chip: Chip, catalogue: dict[str, tuple[Chip, str]]) -> None:
        for name in (chip.name, *chip.aliases):
            if held := catalogue.get(normalize_name(name)):
                reason = f"chip {chip.name} is ignored: {name} is already a name of {held[0].name} of plugin {held[1]}"
                self._fail(plugin, "answer", "flagcore_chips", reason)
                return
        catalogue.update(dict.fromkeys(chip.spellings, (chip, plugin.name)))

    def _order(self, chips: Iterable[Chip]) -> list[Plugin]:
        """Return the plugins in calling order: by name, but those that define one of `chips` last."""
        owners = {self.owner(chip.name) for chip in chips}
        return sorted(self.plugins, key=lambda plugin: (plugin.name in owners, plugin.name))

    def _first(self, chips: Iterable[Chip], hook: str, check: Callable[[object], T], **arguments: object) -> T | None:
        return next(self._all(chips, hook, check, **arguments), None)

    def _all(self, chips: Iterable[Chip], hook: str, check: Callable[[object], T], **arguments: object) -> Iterator[T]:
        for plugin in self._order(chips):
            result = self._call(plugin, hook, check, **arguments)
            if result is not None:
                yield result

    def _call(self, plugin: Plugin, hook: str, check: Callable[[object], T], **arguments: object) -> T | None:
        """Call a hook of one plugin and check its result. Returns None if there is no result, or if the plugin fails.

        Failures are recorded. A plugin is not called again after a hook that did not end within its time limit.
        """
        if plugin.name in self._too_slow:
            return None
        stage, start = "ask", time.monotonic()

        def checked() -> T | None:
            nonlocal stage
            result = plugin.call(hook, arguments)
            stage = "answer"
            return None if result is None else check(result)

        try:
            with nullcontext() if current_thread().name == THREAD else stdout_to_stderr():  # once for all threads
                answer = within(SLOW_HOOK_SECONDS if hook in SLOW_HOOKS else HOOK_SECONDS, checked)
                if (seconds := time.monotonic() - start) > SLOW_SECONDS and hook not in SLOW_HOOKS:
                    LOG.warning("plugin %s: %s took %.0f s", plugin.name, hook, seconds)
                if answer is None:
                    return None
                return cast(T, PluginProxy(plugin.name, answer)) if hook in HOOKS_WITH_OBJECTS else answer
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, TooSlow):
                self._too_slow.add(plugin.name)
            self._fail(plugin, stage, hook, one_line(error))
            return None

    def _fail(self, plugin: Plugin, stage: str, hook: str, reason: str) -> None:
        names = {"name": plugin.name, "distribution": plugin.distribution}
        self._failures[PluginFailure(**names, stage=stage, hook=hook, reason=reason)] = None


def with_overlay(loaded: LoadedPlugins, warn: Callable[[str], object]) -> LoadedPlugins:
    """Return the plugins with what an installed overlay adds, such as the user's calibrations.

    An overlay is a subclass of LoadedPlugins. The first one that can be used is, and those before it are failures of
    the result. `warn`: called with its warnings.
    """
    found: list[Plugin | PluginFailure] = [*loaded.plugins, *loaded.failures]
    for name, points in sorted(installed(OVERLAYS).items()):
        try:
            kind: Callable[..., LoadedPlugins] = subclass_of(LoadedPlugins, load_only(points))
            return within(HOOK_SECONDS, partial(kind, found, warn))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            found.append(PluginFailure(name=name, distribution=origins(points), stage="load", reason=one_line(error)))
    return LoadedPlugins(found) if len(found) > len(loaded.plugins) + len(loaded.failures) else loaded


def load_plugins(disabled: Collection[str] = ()) -> LoadedPlugins:
    """Load all installed plugins, except those in `disabled` or in the comma-separated FLAGCORE_DISABLE_PLUGINS."""
    unreadable: list[PluginFailure] = []
    points = installed(GROUP, unreadable)
    excluded = {*disabled, *os.environ.get(DISABLE_VARIABLE, "").split(",")}
    excluded = {name.strip() for name in excluded} - {""}
    unknown = [_unknown_plugin(name, points) for name in sorted(excluded - {*points})]
    loaded = [_plugin(name, partial(load_only, each), each) for name, each in points.items() if name not in excluded]
    return LoadedPlugins([*unreadable, *unknown, *loaded])


def _plugin(name: str, load: Callable[[], object], points: Sequence[EntryPoint] = ()) -> Plugin | PluginFailure:
    """Return the plugin that `load` returns (from the entry `points`), or why it cannot be used."""
    stage = "load"
    try:
        module = load()
        stage = "check"
        return make_plugin(name, module, points[0] if points else None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        stage = error.stage if isinstance(error, BadPlugin) else stage
        return PluginFailure(name=name, distribution=origins(points), stage=stage, reason=one_line(error))


def _unknown_plugin(name: str, known: Collection[str]) -> PluginFailure:
    similar = closest(name, known)
    hint = f"did you mean {similar}?" if similar else f"installed: {', '.join(sorted(known)) or 'none'}"
    return PluginFailure(name=name, stage="disable", reason=f"cannot be disabled: no plugin has this name; {hint}")
