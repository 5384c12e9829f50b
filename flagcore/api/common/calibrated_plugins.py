"""Plugins whose costs give way to what was measured on the user's own devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flagcore.api.common.machine_load import busy
from flagcore.api.common.unlisted_chips import chip_of, support_from
from flagcore.calibration import Calibration, Calibrations, collective_table, kernel_table
from flagcore.contracts import CollectiveCosts
from flagcore.domain.chip import Chip, bare
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.engine import EngineSupport
from flagcore.errors import RunError
from flagcore.physics.collectives.costs import Collectives
from flagcore.physics.collectives.topology import topology_of
from flagcore.physics.cost_stack import ROOFLINE, CollectiveCostStack, KernelCostStack
from flagcore.physics.kernels.curve import Curve
from flagcore.physics.kernels.roofline import Roofline
from flagcore.plugins import LoadedPlugins
from flagcore.plugins.installed import PluginFailure
from flagcore.plugins.loader import Plugin

CALIBRATED = "calibration"
"""Name of the source of a chip that only a calibration knows."""


class CalibratedPlugins(LoadedPlugins):
    """As `LoadedPlugins`, with the kernel and collective times of a chip from its calibration where there is one.

    `warn` is called with a line for each calibration that costs are made of, for one of fewer devices than a node
    has, and for each file that cannot be read and is of another chip, once each.
    """

    def __init__(
        self,
        plugins: Iterable[Plugin],
        failures: Iterable[PluginFailure],
        calibrations: Calibrations,
        warn: Callable[[str], object],
    ) -> None:
        super().__init__(plugins, failures)
        self._calibrations, self._warn = calibrations, warn
        self._found: dict[str, Calibration | None] = {}
        self._few: set[str] = set()
        self._support: dict[str, EngineSupport] = {}

    def _known_chips(self) -> dict[str, tuple[Chip, str]]:
        """Return the plugins' chips, and those that no plugin catalogues but that were calibrated."""
        if self._catalogue is None:
            catalogue = super()._known_chips()
            saved: tuple[tuple[Path, Calibration], ...] = ()
            with suppress(RunError):  # reported when its times are read
                saved = self._calibrations.all()
            for _, calibration in reversed(saved):
                if calibration.facts is not None and bare(calibration.chip) not in catalogue:
                    with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
                        chip = chip_of(calibration)
                        catalogue[bare(calibration.chip)] = (chip, CALIBRATED)
                        self._chips.append(chip)
                        self._support[chip.name] = support_from(calibration.facts, chip.name)
        return super()._known_chips()

    def engine_support(self, chip: Chip, engine: str, engine_version: str | None = None) -> EngineSupport:
        """Return the plugins' answer; of a chip that only a calibration knows, what torch reported."""
        answer = super().engine_support(chip, engine, engine_version)
        return answer if answer.device_type else self._support.get(chip.name, answer)

    def kernel_costs(self, chip: Chip, engine: str) -> KernelCostStack | None:
        """Return the calibration on top of the plugins' costs and the roofline. Raises RunError."""
        known, calibration = super().kernel_costs(chip, engine), self._calibration(chip)
        if calibration is None:
            return known
        below = known.sources if known else ((ROOFLINE, Roofline(chip=chip)),)
        return KernelCostStack(((CALIBRATED, kernel_table(calibration, chip, _curve(known))), *below))

    def collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | None:
        """Return what was measured inside a node, with the topology's times beyond it. Raises RunError."""
        known, calibration = super().collective_costs(group, engine), self._calibration(group.chip)
        if calibration is not None:
            self._warn_about_few(group, calibration)
        table = collective_table(calibration) if calibration else None
        if table is None:
            return known
        levels = self.topology(group) or topology_of(group)
        measured = Collectives(topology=levels, table=table)
        return CollectiveCostStack((measured, known or Collectives(topology=levels)))

    def _calibration(self, chip: Chip) -> Calibration | None:
        if chip.name not in self._found:
            found = self._calibrations.find(chip, _installed_torch())
            if not self._found:
                for _, error in self._calibrations.unreadable():
                    self._warn(str(error))
            self._found[chip.name] = found[1] if found else None
            if found:
                message = f"{chip.name} is predicted from its calibration of {found[1].date[:10]} ({found[0]})"
                self._warn("; ".join([message, *busy(found[1].others or 0.0)]))
        return self._found[chip.name]

    def _warn_about_few(self, group: NodeGroup, calibration: Calibration) -> None:
        """Tell, once a chip, that a node has more devices than were measured."""
        name, most = group.chip.name, calibration.devices
        if most < group.devices_per_node and name not in self._few:
            self._few.add(name)
            self._warn(
                f"{name} was calibrated on {most} of the {group.devices_per_node} devices of a node: collectives "
                "among more were not measured; run `flag calibrate` where all of them are"
            )


def _curve(costs: KernelCostStack | None) -> Curve:
    """Return the curve that a plugin gives for its chip, or the core's."""
    curve = getattr(costs.sources[0][1], "curve", None) if costs else None
    return curve if isinstance(curve, Curve) else Curve()


def _installed_torch() -> str | None:
    """Return the version of torch that is installed, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
