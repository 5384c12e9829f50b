"""The installation: devices, plugins, engines, and missing packages."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.requirements import Requirement

from flagcore import __version__, plugins
from flagcore.api.common.inputs import loaded_plugins
from flagcore.contracts import untested_reason
from flagcore.domain.chip import Chip, Fact, Support
from flagcore.errors import FlagError, NoDevice
from flagcore.i18n import _


def devices(without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the devices of this machine with facts about their chips. Raises NoDevice without a device."""
    with loaded_plugins(without) as loaded:
        found_devices = loaded.devices()
        if not found_devices:
            names = ", ".join(plugin.name for plugin in loaded.plugins)
            raise NoDevice(_("no device found by the installed plugins ({plugins})", plugins=names or _("none")))
        return [_device(loaded, device) for device in found_devices]


def plugin_table(without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return one record per plugin, loaded or failed, with its chips and the reasons of failures."""
    loaded_plugins = plugins.load_plugins(without)
    undetected_vendors = loaded_plugins.detection_failures()
    chips = loaded_plugins.chips()
    records: list[dict[str, Any]] = []
    for plugin in loaded_plugins.plugins:
        maturity = loaded_plugins.maturity(plugin)
        records.append(
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "status": "loaded",
                "maturity": {"word": maturity.word, **asdict(maturity)} if maturity else None,
                "chips": [chip.name for chip in chips if loaded_plugins.owner(chip.name) == plugin.name],
                "warnings": list(plugin.warnings),
                "problem": "; ".join(str(f) for f in loaded_plugins.failures if f.name == plugin.name) or None,
                "undetected": undetected_vendors.get(plugin.name),
            }
        )
    names = {record["name"] for record in records}
    empty: dict[str, Any] = {"version": None, "status": "failed", "maturity": None, "chips": [], "warnings": []}
    for failure in loaded_plugins.failures:
        if failure.name not in names:
            identity = {"name": failure.name, "distribution": failure.distribution}
            records.append({**identity, **empty, "problem": str(failure), "undetected": None})
    return records


def chip_table(without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return one record per chip of the plugins, with aliases and facts; unknown facts are None."""
    with loaded_plugins(without) as loaded:
        return [_chip(loaded, chip) for chip in sorted(loaded.chips(), key=lambda chip: chip.name.casefold())]


def doctor() -> list[dict[str, Any]]:
    """Return one record per requirement: its purpose, its version or None, and the fix.

    `ok` is true, false, or "untested" for an engine that was never tested, or not on the chip.
    """
    records = [
        _requirement_record("flagcore", _("the tuner"), __version__, ""),
        _requirement_record("python", _("3.10 or later"), platform.python_version(), _("install a newer Python")),
    ]
    for name in plugins.names(plugins.WORKLOADS):
        try:
            engine = plugins.workload(name)
        except FlagError as error:
            records.append(_requirement_record(name, _("engine"), None, str(error)))
            continue
        for module, requirement in engine.modules.items():
            purpose = _("engine {name} ({module})", name=name, module=module)
            part = _requirement(Requirement(requirement), purpose, name)
            records.append(_untested(part, untested_reason(engine)))
    records += _support()
    for record in plugin_table():
        name, found = record["distribution"] or record["name"], record["version"]
        records.append(
            _requirement_record(name, _("plugin {name}", name=record["name"]), found, record["problem"] or "")
        )
        if record["undetected"]:
            records.append(
                _requirement_record(
                    name, _("devices of plugin {name}", name=record["name"]), None, record["undetected"]
                )
            )
    return records


def _support() -> Iterator[dict[str, Any]]:
    """Yield one record per engine and kind of chip found here: whether the chip's plugin supports it."""
    with loaded_plugins(()) as loaded:
        chips_by_name = {chip.name: chip for device in loaded.devices() if (chip := loaded.find_chip(device.chip))}
        for chip in chips_by_name.values():
            for engine in plugins.names(plugins.WORKLOADS):
                answer, reason = loaded.engine_support(chip, engine), ""
                with suppress(FlagError):
                    reason = untested_reason(plugins.workload(engine))
                if answer.support is Support.UNKNOWN:
                    reason = answer.reason
                fix = f"{answer.support.value}: {answer.reason}"
                runs = answer.support in (Support.YES, Support.UNKNOWN)
                part = _requirement_record(
                    chip.name, _("engine {name} on this chip", name=engine), answer.device_type, fix, runs
                )
                yield _untested(part, reason)


def _chip(loaded: plugins.LoadedPlugins, chip: Chip) -> dict[str, Any]:
    def scaled(fact: Fact | None, unit: float) -> float | None:
        return fact.value / unit if fact else None

    best = _usual_precision(chip)
    return {
        "chip": chip.name,
        "plugin": loaded.owner(chip.name),
        "aliases": list(chip.aliases),
        "memory_gib": scaled(chip.memory_bytes, 2**30),
        "memory_gbytes_per_second": scaled(chip.memory_bandwidth_bytes_per_second, 1e9),
        "peak_tflops": chip.dense_flops_per_second[best].value / 1e12 if best else None,
        "peak_precision": best,
        "precisions": list(chip.dense_flops_per_second),
        "devices_per_node": chip.devices_per_node,
        "devices_per_card": chip.devices_per_card,
        "link": chip.link.name if chip.link else None,
        "link_gbytes_per_second": scaled(chip.link.bytes_per_second, 1e9) if chip.link else None,
        "host_gbytes_per_second": scaled(chip.host_bytes_per_second, 1e9),
        "nic_gbytes_per_second": scaled(chip.nic_bytes_per_second, 1e9),
    }


def _usual_precision(chip: Chip) -> str | None:
    return next((name for name in ("bf16", "fp16", "fp32") if name in chip.dense_flops_per_second), None)


def _device(loaded: plugins.LoadedPlugins, device: Any) -> dict[str, Any]:
    chip = loaded.find_chip(device.chip)
    flops = chip.dense_flops_per_second if chip else {}
    best = _usual_precision(chip) if chip else None
    return {
        "index": device.index,
        "name": device.chip,
        "chip": chip.name if chip else None,
        "plugin": loaded.owner(device.chip) if chip else None,
        "memory_gib": device.memory_bytes / 2**30 if device.memory_bytes else None,
        "peak_tflops": flops[best].value / 1e12 if best else None,
        "peak_precision": best,
        "peak_source": flops[best].source.kind if best else None,
        "driver": device.driver or None,
        "aliases": list(chip.aliases) if chip else [],
    }


def _requirement_record(name: str, purpose: str, found: str | None, fix: str, ok: bool | None = None) -> dict[str, Any]:
    """Return a record of `doctor`; by default it is ok if a version was found."""
    ok = found is not None if ok is None else ok
    return {"name": name, "for": purpose, "version": found, "ok": ok, "mend": "" if ok else fix}


def _untested(part: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return a record of `doctor` that is ok as untested, if there is a reason."""
    return {**part, "ok": _("untested"), "mend": reason} if part["ok"] and reason else part


def _requirement(wanted: Requirement, purpose: str, extra: str) -> dict[str, Any]:
    """Return a record of an installed distribution, not ok if it is missing or has another version."""
    try:
        installed = version(wanted.name)
    except PackageNotFoundError:
        installed = None
    ok = installed is not None and wanted.specifier.contains(installed, prereleases=True)
    return _requirement_record(wanted.name, purpose, installed, f"pip install 'flagcore[{extra}]'", ok)
