"""What the kit adds to the installed plugins: the user's calibrations with chips that no plugin lists, the knobs of the
user's measured choices, the evidence in `maturity.yaml`, and settings that change the cost on all engines."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from flagcore.contracts import CollectiveCosts
from flagcore.domain.chip import Chip, Device, Fact, Source, Support, normalize_name
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.engine import EngineSupport, Unmodelled
from flagcore.domain.knob import Knob
from flagcore.domain.spec import Task
from flagcore.errors import FlagError, NoDevice, RunError
from flagcore.i18n import N_, _
from flagcore.loading.entry_points import installed
from flagcore.physics.collective_costs import Collectives, topology_of
from flagcore.physics.roofline import CollectiveCostStack, Curve, KernelCostStack, Roofline
from flagcore.plugins import LoadedPlugins, Plugin, PluginFailure
from flagcore_vendorkit.calibration.store import Calibration, Calibrations, collective_table, kernel_table
from flagcore_vendorkit.choices import Choice, choices
from flagcore_vendorkit.engines import UNCALIBRATED, read_maturity
from flagcore_vendorkit.kept import Named, kept
from flagcore_vendorkit.machine import TorchReport, query_torch
from flagcore_vendorkit.settings import unmodelled_on_all_engines

T = TypeVar("T")
CALIBRATED = "calibration"
"""The source name of a chip that only a calibration describes."""


class ExtendedPlugins(LoadedPlugins, Named):
    """`LoadedPlugins` with the user's measurements: kernel and collective times of calibrations, and knobs of choices.

    `warn` is called once for each calibration in use, for a calibration of fewer devices than a node has, and for each
    unreadable file of another chip or of choices.
    """

    def __init__(self, found: Iterable[Plugin | PluginFailure], warn: Callable[[str], object]) -> None:
        super().__init__(found)
        self._calibrations, self._warn = Calibrations.of_user(), warn
        self._saved = cache(self._calibrations.all)
        self._found: dict[str, Calibration | None] = {}
        self._calibrated_on_few: set[str] = set()
        self._support: dict[str, EngineSupport] = {}

    def _catalogue(self, name: str) -> dict[str, tuple[Chip, str]]:
        """The chips of the plugins, and the calibrated chips with `name` that no plugin lists."""
        catalogue = super()._catalogue(name)
        with suppress(RunError):  # the error is reported when the calibration's times are read
            for _file, calibration in reversed(self._saved()):
                key, facts = normalize_name(calibration.chip), calibration.facts
                if facts is not None and name in key and key not in catalogue:
                    with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
                        chip = chip_of(calibration)
                        catalogue[key] = (chip, CALIBRATED)
                        kind, backend = str(facts.get("device_type")), str(facts.get("distributed_backend"))
                        self._support[chip.name] = support_of(kind, backend, chip.name)
        return catalogue

    @cached_property
    def _choices(self) -> tuple[Choice, ...]:
        """The saved choices that are better than the defaults, and can be read."""
        return tuple(each for _file, each in choices(self._warn) if each.environment)

    def knobs(self, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[Knob, ...]:
        """Return the plugins' knobs, and one for each saved choice for this engine and chip. A choice comes first."""
        measured = [each.as_knob() for each in self._choices if each.engine == engine and chip.has_name(each.chip)]
        knobs = (*measured, *super().knobs(chip, engine, engine_version))
        return tuple({knob.name: knob for knob in reversed(knobs)}.values())[::-1]

    def engine_support(self, chip: Chip, engine: str, engine_version: str | None = None) -> EngineSupport:
        """Return the plugins' engine support, or torch's report for a chip that only a calibration describes.

        A calibrated chip has no factor for kernels that nobody measured.
        """
        answer = super().engine_support(chip, engine, engine_version)
        if UNCALIBRATED in answer.overheads and self._calibration(chip):
            kept_values = {name: value for name, value in answer.overheads.items() if name != UNCALIBRATED}
            answer = replace(answer, overheads=kept_values)
        return answer if answer.device_type else self._support.get(chip.name, answer)

    def kernel_costs(self, chip: Chip, engine: str) -> KernelCostStack | None:
        """Return costs from the calibration, with the plugins' costs and the roofline as fallbacks. Raises RunError."""
        plugin_costs, calibration = super().kernel_costs(chip, engine), self._calibration(chip)
        if calibration is None:
            return plugin_costs
        fallbacks = plugin_costs.sources if plugin_costs else (Roofline(chip=chip),)
        products, curve = (getattr(fallbacks[0], name, None) for name in ("products", "curve"))
        if not isinstance(products, Roofline):  # a plugin's model of products, which has terms that no curve has
            products = Roofline(curve=curve if isinstance(curve, Curve) else Curve(), chip=chip)
        return KernelCostStack((kernel_table(calibration, replace(products, chip=chip)), *fallbacks))

    def collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | None:
        """Return measured times within a node, and times from the topology for larger groups. Raises RunError."""
        plugin_costs, calibration = super().collective_costs(group, engine), self._calibration(group.chip)
        name, total = group.chip.name, group.devices_per_node
        if calibration and calibration.devices < total and name not in self._calibrated_on_few:
            self._calibrated_on_few.add(name)
            text = N_("{chip} was calibrated on {count} of the {total} devices of a node; calibrate a whole node")
            self._warn(_(text, chip=name, count=calibration.devices, total=total))
        table = collective_table(calibration) if calibration else None
        if table is None:
            return plugin_costs
        levels = self.topology(group) or topology_of(group)
        collectives = Collectives(topology=levels, table=table)
        return CollectiveCostStack((collectives, plugin_costs or Collectives(topology=levels)))

    def unmodelled(self, task: Task) -> Iterable[Unmodelled]:
        return unmodelled_on_all_engines(task)

    def maturity(self, plugin: Plugin) -> Mapping[str, Any] | None:
        """Return the content of the `maturity.yaml` of a plugin's package, or None if it has no valid one."""
        with suppress(FlagError, TypeError):  # the package of an add-on may be a single module
            if plugin.package and (known := read_maturity(plugin.package)):
                return {"word": known.word, **asdict(known)}
        return None

    def unlisted_chip(self) -> tuple[Chip, EngineSupport, tuple[Device, ...]] | None:
        """See `LoadedPlugins`. Raises NoDevice if there is such a chip, but torch finds no accelerator, because nothing
        can be measured then."""
        unknown_devices = [device for device in self.devices() if self.find_chip(device.chip) is None]
        torch_report = accelerator_report()
        if torch_report and not unknown_devices:
            unknown_devices = [device for device in torch_report.devices if self.find_chip(device.chip) is None]
        if not unknown_devices:
            return None
        name = Counter(device.chip for device in unknown_devices).most_common(1)[0][0]
        if torch_report is None:
            problem = _("no installed plugin lists {chip}, and torch finds no accelerator on this machine", chip=name)
            raise NoDevice(problem + "; " + _("install the vendor's torch, or its plugin"))
        same_chip = tuple(device for device in unknown_devices if device.chip == name)
        memory = min((device.memory_bytes for device in same_chip if device.memory_bytes), default=None)
        source = Source(kind="measured", detail="reported by torch")
        memory_fact = Fact(value=float(memory), source=source) if memory else None
        chip = Chip(name=name, vendor=VENDOR, memory_bytes=memory_fact, devices_per_node=len(same_chip))
        return chip, support_of(torch_report.kind, torch_report.backend, name), same_chip

    @property
    def identity(self) -> object:
        return [(each.name, each.distribution, each.version, each.package, each.hooks) for each in self.plugins]

    def kept(self, compute: Callable[[], T], about: Iterable[object]) -> T:
        """Return the result of `compute`, or of an earlier command, if all plugins are installed distributions."""
        if not all(each.package for each in self.plugins):
            return compute()
        before = self.failures
        return kept(compute, (*about, self, before), lambda: self.failures == before)

    def _calibration(self, chip: Chip) -> Calibration | None:
        if chip.name not in self._found:
            calibration = self._calibrations.find(chip, _installed_torch())
            if not self._found:
                for _file, error in self._calibrations.skipped_files():
                    self._warn(str(error))
            self._found[chip.name] = calibration[1] if calibration else None
            if calibration:
                date, others = calibration[1].date[:10], busy(calibration[1].others or 0.0)
                message = _("{chip} is predicted from its calibration of {date}", chip=chip.name, date=date)
                self._warn("; ".join([f"{message} ({calibration[0]})", *others]))
        return self._found[chip.name]


def _installed_torch() -> str | None:
    with suppress(PackageNotFoundError):
        return version("torch")
    return None


SECONDS = 60.0
"""Seconds after which the import of torch with a vendor's driver is given up."""

VENDOR = "uncatalogued"


def accelerator_report() -> TorchReport | None:
    """Return torch's report of the accelerator of this machine.

    Returns None if torch is not installed or finds no accelerator.
    """
    # Extensions such as torch_npu add their devices to builds of torch for CPUs.
    if (_installed_torch() or "").endswith("+cpu") and not installed("torch.backends"):
        return None
    report = query_torch("any", timeout_seconds=SECONDS)
    return report if report and report.devices else None


def chip_of(calibration: Calibration) -> Chip:
    """Create the chip that no plugin lists from its calibration.

    Its peak rates are estimated: the highest measured rate is divided by the share of the peak that large kernels reach
    on other chips. The roofline uses these peaks for kernels without a measurement.
    """
    facts = calibration.facts or {}
    source = Source(kind="measured", detail=f"flag calibrate, {calibration.date[:10]}")
    rates: dict[str, float] = {}
    bytes_per_second = 0.0
    for row in calibration.rows:
        per_second = 1e6 / float(row["us"])
        if row.get("kernel") == "gemm":
            rate = 2.0 * per_second * float(row["m"]) * float(row["n"]) * float(row["k"])
            rates[str(row["precision"])] = max(rates.get(str(row["precision"]), 0.0), rate)
        elif row.get("kernel") == "copy":
            bytes_per_second = max(bytes_per_second, per_second * float(row["bytes"]))
    return Chip(
        name=calibration.chip,
        vendor=VENDOR,
        memory_bytes=_fact(facts.get("memory_bytes"), source),
        memory_bandwidth_bytes_per_second=_fact(bytes_per_second / Curve().memory_share, source),
        dense_flops_per_second={
            name: Fact(value=rate / Curve().gemm_share, source=source) for name, rate in sorted(rates.items())
        },
        devices_per_node=int(facts.get("devices_per_node") or 1),
    )


def support_of(kind: str, backend: str, name: str) -> EngineSupport:
    """Return the engine support of a chip that no plugin lists: untested, with the backend that torch reports."""
    reason = f"no installed plugin lists {name}; torch calls it {kind}"
    return EngineSupport(support=Support.UNKNOWN, reason=reason, device_type=kind, distributed_backend=backend)


def _fact(value: object, source: Source) -> Fact | None:
    return Fact(value=float(value), source=source) if isinstance(value, (int, float)) and value > 0 else None


BUSY = 0.1
"""The minimum share of the processors, used by other processes, for which a warning is given."""


def busy(others: float) -> list[str]:
    """Return a warning if other processes used much of the processors, else an empty list.

    `others` is the share that they used, from 0 to 1.
    """
    if others < BUSY:
        return []
    return [f"other programs used {others:.0%} of the processors: measure again on an idle machine"]
