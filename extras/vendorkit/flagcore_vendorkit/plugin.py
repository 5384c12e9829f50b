"""The hooks of a vendor plugin, implemented with the YAML files of its package and the vendor's management tool."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.resources import files
from typing import Any

from flagcore.contracts import KernelCosts, MemoryModel, Telemetry
from flagcore.domain.chip import Chip, Device, Source, Support, normalize_name
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import DeviceResource, EngineSupport, TaskAdvice
from flagcore.domain.knob import Knob
from flagcore.domain.spec import Task
from flagcore.hooks import hookimpl
from flagcore.i18n import N_, Message
from flagcore.physics.collective_costs import topology_of
from flagcore.physics.collective_curves import CollectiveTable
from flagcore.physics.roofline import PlainMemory
from flagcore_vendorkit.chip_file import collective_table, cost_file, kernel_costs, load_chips
from flagcore_vendorkit.detection import DeviceDetector, DeviceReading, Readings
from flagcore_vendorkit.engines import OF_WIDTHS, Report, all_knobs, read_engines, read_quirks, read_variables
from flagcore_vendorkit.fields import S, applicable
from flagcore_vendorkit.settings import Settings, read_settings

UNFITTED = N_(
    "no published server on {chip} gave the times of small kernels, launches and small messages: those of other chips"
    " are assumed, and answers may take several times as long"
)
"""The note on servers on a chip without times of its own."""
FIRST = {
    True: N_("the first {count} steps of a trial are not measured: {reason}"),
    False: N_("the first {count} requests of a load are not measured: {reason}"),
}
"""The note on warm-up, by whether the engine trains in steps."""
HIDDEN = N_("{set} is set, so {name} has no effect: unset it")


SLACK = 0.02
"""Estimated for vendors that measured nothing else: their torch has torch's caching allocator, or one modelled on it,
which reserves 0.05% to 3% more than it allocates on other chips."""


def usual_memory(fragmentation: float = SLACK, **figures: float) -> Callable[[NodeGroup, str], MemoryModel]:
    """Return a value of `VendorPlugin.memory`: the model of a caching allocator with the same figures for all chips.

    The figures are fields of `PlainMemory`.
    """
    return lambda group, engine: PlainMemory.of(group, fragmentation=fragmentation, **figures)


@dataclass(frozen=True, eq=False, kw_only=True)
class VendorPlugin:
    """A plugin whose facts are in files of its `package`.

    The files are chips/, costs/, engines.yaml, environment.yaml, settings.yaml, quirks.yaml, knobs.yaml, maturity.yaml
    and published.jsonl; all but chips/ are optional. `vendor` is the vendor's name in the chip files. `memory` returns
    the memory model of a device of a node group under an engine. `detector` finds devices; if it is None, this plugin
    finds none. Subclass this class to override a hook.
    """

    package: str
    vendor: str
    memory: Callable[[NodeGroup, str], MemoryModel]
    detector: DeviceDetector | None = None

    def owns(self, chip: Chip) -> bool:
        """Return whether `chip` is one of this vendor's chips."""
        return chip.vendor == self.vendor

    @cached_property
    def _readings(self) -> Readings | None:
        return Readings(self.detector) if self.detector else None

    @hookimpl
    def flagcore_chips(self, name: str) -> Sequence[Chip]:
        return load_chips(self.package, name.removeprefix(normalize_name(self.vendor)))

    @hookimpl
    def flagcore_published_runs(self) -> Sequence[Mapping[str, Any]]:
        file = files(self.package).joinpath("published.jsonl")
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else ()

    @hookimpl
    def flagcore_devices(self, environment: Mapping[str, str]) -> Sequence[Device]:
        return self.detector.devices(environment=environment) if self.detector else ()

    @hookimpl
    def flagcore_vendor(self, environment: Mapping[str, str]) -> str | None:
        return self.detector.vendor_of(environment) if self.detector else None

    @hookimpl
    def flagcore_health(self, chip: Chip) -> Sequence[str] | None:
        return self.detector.problems() if self.detector and self.owns(chip) else None

    @hookimpl
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        with_adapters = self.detector.with_own_adapters(group) if self.detector and self.owns(group.chip) else None
        return topology_of(with_adapters) if with_adapters else None

    @hookimpl
    def flagcore_memory_model(self, group: NodeGroup, engine: str, kind: str) -> MemoryModel | None:
        return self.memory(group, engine) if self.owns(group.chip) else None

    @hookimpl
    def flagcore_kernel_costs(self, chip: Chip, kind: str) -> KernelCosts | None:
        return kernel_costs(self.package, chip, kind) if self.owns(chip) else None

    @hookimpl
    def flagcore_collective_costs(self, group: NodeGroup) -> CollectiveTable | None:
        return collective_table(self.package, group.chip) if self.owns(group.chip) else None

    @hookimpl
    def flagcore_engine_support(
        self, chip: Chip, engine: str, engine_version: str | None, kind: str
    ) -> EngineSupport | None:
        support = read_engines(self.package).get(kind) if self.owns(chip) else None
        if support is None:
            return None
        quirks, about = read_quirks(self.package), (chip, engine, engine_version, kind)
        for report in applicable(quirks.support, *about)[:1]:
            support = _reported(support, report)
        for found in reversed(applicable(quirks.overheads, *about)):
            support = replace(support, overheads={**support.overheads, **found.values})
        if support.support is not Support.YES and not support.reason:
            support = replace(
                support, reason=Message("no run of {engine} on {chip} has been reported", engine=engine, chip=chip.name)
            )
        notes: list[str] = [_sourced(each.note, each.source) for each in applicable(quirks.notes, *about)]
        is_fitted = bool(support.overheads.keys() - {*OF_WIDTHS} or support.shared_devices)
        is_fitted |= not support.overheads and cost_file(self.package, chip, "serving.yaml") is not None
        if kind == "serve" and not is_fitted:
            notes.append(Message(UNFITTED, chip=chip.name))
        kubernetes, slurm = (_of_chip(each, chip) for each in (support.kubernetes, support.slurm))
        support = replace(support, kubernetes=kubernetes, slurm=slurm)
        if self.detector:
            visible, outer = support.visible_devices or self.detector.visible, self.detector.outer
            support = replace(support, visible_devices=visible, outer_variable=support.outer_variable or outer)
        return replace(support, notes=tuple(notes))

    @hookimpl
    def flagcore_check_task(self, task: Task, engine_version: str | None) -> TaskAdvice | None:
        chips = [group.chip for group in task.cluster.groups if self.owns(group.chip)]
        if not chips:
            return None

        def of_chips(quirks: Iterable[S]) -> tuple[S, ...]:
            about = (task.spec.work.engine, engine_version, task.spec.work.kind)
            return tuple(dict.fromkeys(each for chip in chips for each in applicable(quirks, chip, *about)))

        quirks, is_set = read_quirks(self.package), {*os.environ, *task.spec.envs, *task.spec.cluster.envs}
        settings = read_settings(self.package) if any(task.spec.variables) else Settings()
        variables = of_chips(read_variables(self.package))
        usual = {each.name: each.value for each in variables if each.value and each.applies_to(task)}
        hidden = [each for each in variables if each.overridden_by in is_set]
        first, slow = FIRST[task.spec.work.has_steps], of_chips(quirks.warmup)
        return TaskAdvice(
            rules=(*of_chips(quirks.refused), *of_chips(quirks.forced)),
            preferred=of_chips(quirks.preferred),
            warmup=max((each.count for each in slow), default=0),
            failures=of_chips(quirks.failures),
            unmodelled=tuple(settings.of_environment(task.spec, usual)),
            harmless=settings.harmless_in(task.spec, usual),
            notes=(
                *(Message(first, count=each.count, reason=Message(each.reason)) for each in slow),
                *(Message(HIDDEN, set=each.overridden_by, name=each.name) for each in hidden),
            ),
        )

    @hookimpl
    def flagcore_knobs(self, chip: Chip, engine: str, engine_version: str | None) -> Sequence[Knob] | None:
        if not self.owns(chip):
            return None
        listed, support = all_knobs(self.package), read_engines(self.package).get("train")
        if listed and support and "flagcx" in support.cross_vendor_libraries:
            listed = (*listed, *all_knobs(__package__))
        return [each.knob for each in listed if each.scope.includes(chip, engine, engine_version)] or None

    @hookimpl
    def flagcore_environment(
        self, chip: Chip, engine: str, engine_version: str | None, task: Task | None, kind: str
    ) -> Mapping[str, str] | None:
        if not self.owns(chip):
            return None
        variables = applicable(read_variables(self.package), chip, engine, engine_version, kind)
        return {each.name: each.value for each in variables if each.value and each.applies_to(task)}

    @hookimpl
    def flagcore_telemetry(self, device: Device) -> Telemetry | None:
        known = any(chip.has_name(device.chip) for chip in self.flagcore_chips(normalize_name(device.chip)))
        return DeviceReading(self._readings, device.index) if self._readings and known else None


def _sourced(note: str, source: Source) -> Message:
    return Message("{note} ({kind}: {source})", note=Message(note), kind=Message(source.kind), source=source.detail)


def _of_chip(resource: DeviceResource | None, chip: Chip) -> DeviceResource | None:
    """Return the resource with its name for a chip."""
    names = resource.chips.items() if resource else ()
    name = next((name for pattern, name in names if fnmatchcase(chip.name, pattern)), "")
    return replace(resource, name=name) if resource and name else resource


def _reported(support: EngineSupport, report: Report) -> EngineSupport:
    """Return the support of a section of `engines.yaml` with what a report about one engine states."""
    works = {None: support.support, True: Support.YES, False: Support.NOT_YET}[report.works]
    preload = support.preload if report.preload is None else report.preload
    install = report.install or support.install
    return replace(support, support=works, reason=report.reason, preload=preload, install=install)
