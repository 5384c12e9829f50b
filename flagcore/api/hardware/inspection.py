"""What is here: devices, plugins, engines, and what is missing for which."""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.requirements import Requirement

from flagcore import __version__, plugins
from flagcore.api.common.warnings import loaded_plugins
from flagcore.contracts import untested_reason
from flagcore.domain.chip import Chip, Fact, Support
from flagcore.domain.maturity import Maturity
from flagcore.errors import FlagError, NoDevice


def devices(without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the devices of this machine with what plugins know of their chips. Raises NoDevice if there is none."""
    with loaded_plugins(without) as loaded:
        found = loaded.devices()
        if not found:
            names = ", ".join(plugin.name for plugin in loaded.plugins)
            raise NoDevice(f"no device found by the installed plugins ({names or 'none'})")
        return [_device(loaded, device) for device in found]


def plugin_table(without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return one record a plugin, loaded or failed, with its chips and the reason of every failure."""
    loaded = plugins.load_plugins(without)
    undetected = loaded.undetected()
    chips = loaded.chips()
    records: list[dict[str, Any]] = [
        {
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "status": "loaded",
            "maturity": _maturity(loaded.maturity(plugin)),
            "chips": [chip.name for chip in chips if loaded.owner(chip.name) == plugin.name],
            "warnings": list(plugin.warnings),
            "problem": "; ".join(str(f) for f in loaded.failures if f.name == plugin.name) or None,
            "undetected": undetected.get(plugin.name),
        }
        for plugin in loaded.plugins
    ]
    known = {record["name"] for record in records}
    records += [
        {
            "name": failure.name,
            "distribution": failure.distribution,
            "version": None,
            "status": "failed",
            "maturity": None,
            "chips": [],
            "warnings": [],
            "problem": str(failure),
            "undetected": None,
        }
        for failure in loaded.failures
        if failure.name not in known
    ]
    return records


def _maturity(maturity: Maturity | None) -> dict[str, Any] | None:
    """Return what a plugin says of itself; `word` is hardware, transcripts or documents, the best of it."""
    return {"word": maturity.word, **asdict(maturity)} if maturity else None


def chip_table(without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return one record a chip that a plugin knows, with its aliases and what is known of it; None where nothing is."""
    with loaded_plugins(without) as loaded:
        return [_chip(loaded, chip) for chip in sorted(loaded.chips(), key=lambda chip: chip.name.casefold())]


def doctor() -> list[dict[str, Any]]:
    """Return one record a thing that flagcore may need: what it is for, its version or None, and what mends it."""
    records: list[dict[str, Any]] = [
        _part("flagcore", "the tuner", __version__, ""),
        _part("python", "3.10 or later", platform.python_version(), "install a newer Python"),
    ]
    for name in plugins.names(plugins.WORKLOADS):
        try:
            engine = plugins.workload(name)
        except FlagError as error:
            records.append(_part(name, "engine", None, str(error)))
            continue
        marks = ", untested" if untested_reason(engine) else ""
        for module, requirement in engine.modules.items():
            records.append(_requirement(Requirement(requirement), f"engine {name} ({module}{marks})", name))
    records += _support()
    for record in plugin_table():
        name, loaded = record["distribution"] or record["name"], record["status"] == "loaded"
        records.append(
            _part(name, f"plugin {record['name']}", record["version"] if loaded else None, record["problem"] or "")
        )
        if record["undetected"]:
            records.append(_part(name, f"devices of plugin {record['name']}", None, record["undetected"]))
    return records


def _support() -> list[dict[str, Any]]:
    """Return one record an engine and kind of chip that was found here: whether somebody says that it works."""
    with loaded_plugins(()) as loaded:
        found = {chip.name: chip for device in loaded.devices() if (chip := loaded.find_chip(device.chip))}
        pairs = [(chip, engine) for chip in found.values() for engine in plugins.names(plugins.WORKLOADS)]
        answers = [(chip, engine, loaded.engine_support(chip, engine)) for chip, engine in pairs]
    return [
        {
            "name": chip.name,
            "for": f"engine {engine} on this chip",
            "version": answer.device_type,
            "ok": answer.support is Support.YES,
            "mend": "" if answer.support is Support.YES else f"{answer.support.value}: {answer.reason}",
        }
        for chip, engine, answer in answers
    ]


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


def _part(name: str, purpose: str, found: str | None, mend: str) -> dict[str, Any]:
    return {"name": name, "for": purpose, "version": found, "ok": found is not None, "mend": mend if not found else ""}


def _requirement(wanted: Requirement, purpose: str, extra: str) -> dict[str, Any]:
    """Return a record of an installed distribution, not ok if it is missing or of another version than wanted."""
    mend = f"pip install 'flagcore[{extra}]'"
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return _part(wanted.name, purpose, None, mend)
    fits = wanted.specifier.contains(found, prereleases=True)
    return {"name": wanted.name, "for": purpose, "version": found, "ok": fits, "mend": "" if fits else mend}
