"""Chooses the chip of this machine that a job or a measurement uses."""

from collections import Counter

from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.engine import EngineSupport
from flagcore.errors import NoDevice
from flagcore.i18n import N_, _
from flagcore.plugins.entry_points import engines, first_engine
from flagcore.plugins.loaded import LoadedPlugins


def best_chip(devices: tuple[Device, ...], plugins: LoadedPlugins, engine: str) -> Chip:
    """Return the most common chip of this machine. A CPU is returned only if there is no accelerator.

    Raises NoDevice if no chip is known, or if only a CPU is found and the detection of other devices failed.
    """
    counts = Counter(device.chip for device in devices)
    chip_counts = [(chip, count) for name, count in counts.items() for chip in plugins.chips() if chip.has_name(name)]
    if not chip_counts:
        text = N_(
            "no usable device: found {devices}; install the vendor's plugin (`flag plugins list` shows what is "
            "installed), measure it with `flag calibrate`, or name a chip to plan for"
        )
        raise NoDevice(_(text, devices=", ".join(counts) or _("no device at all")))
    is_accelerator, _count, chip = max(
        ((not plugins.engine_support(chip, engine).shared_devices, count, chip) for chip, count in chip_counts),
        key=lambda found: found[:2],
    )
    if not is_accelerator and plugins.detection_failures():
        failures = "; ".join(f"plugin {name}: {reason}" for name, reason in plugins.detection_failures().items())
        text = N_(
            "no usable device: only {chip} is left, as devices could not be detected ({why}); fix that, or give "
            "cluster.chip: {chip} to use it"
        )
        raise NoDevice(_(text, chip=chip.name, why=failures))
    return chip


def target(loaded: LoadedPlugins) -> tuple[Chip, EngineSupport, tuple[Device, ...], str]:
    """Return the chip to measure, its engine support, its devices, and the name of the engine.

    A chip that no plugin lists takes precedence over a plain CPU. Raises NoDevice.
    """
    detected_devices = loaded.devices()
    known_chips = [chip for device in detected_devices if (chip := loaded.find_chip(device.chip))]
    training_engine = first_engine()
    if all(loaded.engine_support(chip, training_engine).shared_devices for chip in known_chips) and (
        unlisted := loaded.unlisted_chip()
    ):
        return (*unlisted, training_engine)
    reasons = []
    for engine in dict.fromkeys([training_engine, *engines()]):
        chip = best_chip(detected_devices, loaded, engine)
        support = loaded.engine_support(chip, engine)
        names_device = support.device_type is not None and support.distributed_backend is not None
        if names_device and support.support is not Support.IMPOSSIBLE:
            return chip, support, tuple(device for device in detected_devices if chip.has_name(device.chip)), engine
        reasons.append(support.reason)
    raise NoDevice("; ".join(reasons) or _("no engine is installed"))
