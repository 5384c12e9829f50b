"""Reports on the installation: devices, plugins, engines, and missing packages."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.inputs import SpecLike, loaded_plugins, read_spec, spec_data
from flagcore.api.notes import LOG
from flagcore.contracts import HostCheck, device_use
from flagcore.domain.chip import MEMORY_IN_USE, TRAINED, Chip, Device, Fact, Support, slowness, usual_precision
from flagcore.domain.spec import AUTO
from flagcore.errors import FlagError, NoDevice, UsageError
from flagcore.i18n import N_, _
from flagcore.loading.limits import TooSlow, within
from flagcore.spec.clusters import read_hosts

IMPORT_SECONDS = 60.0
"""Seconds that importing the modules of a chip's engines may take."""


def devices(without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the devices of this machine with facts about their chips. Raises NoDevice if there is none."""
    with loaded_plugins(without) as loaded:
        found_devices = loaded.devices()
        if not found_devices:
            names = ", ".join(plugin.name for plugin in loaded.plugins)
            raise NoDevice(_("no device found by the installed plugins ({plugins})", plugins=names or _("none")))
        chip_by_name = {device.chip: loaded.find_chip(device.chip) for device in found_devices}
        chips = {name: chip and loaded.measured_chip(chip) for name, chip in chip_by_name.items()}
        return [_device(loaded, device, chips[device.chip]) for device in found_devices]


def plugin_table(without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return one record per plugin, loaded or failed, with its chips and the reasons for failures."""
    return _plugins(plugins.with_overlay(plugins.load_plugins(without), LOG.warning))


def _plugins(loaded: plugins.LoadedPlugins) -> list[dict[str, Any]]:
    undetected_vendors, chips = loaded.detection_failures(), loaded.chips()
    records: list[dict[str, Any]] = [
        {
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "status": "loaded",
            "maturity": loaded.maturity(plugin),
            "chips": [chip.name for chip in chips if loaded.owner(chip.name) == plugin.name],
            "problem": "; ".join(str(f) for f in loaded.failures if f.name == plugin.name) or None,
            "undetected": undetected_vendors.get(plugin.name),
        }
        for plugin in loaded.plugins
    ]
    names = {record["name"] for record in records}
    empty: dict[str, Any] = {"version": None, "status": "failed", "maturity": None, "chips": [], "undetected": None}
    for each in loaded.failures:
        if each.name not in names:
            records.append({"name": each.name, "distribution": each.distribution, "problem": str(each), **empty})
    return records


def chip_table(without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return one record per chip of the plugins, with its aliases and facts. Unknown facts are None."""
    with loaded_plugins(without) as loaded:
        return [_chip(loaded, chip) for chip in sorted(loaded.chips(), key=lambda chip: chip.name.casefold())]


def doctor(*, measure: bool = True) -> list[dict[str, Any]]:
    """Return one record per requirement: its purpose, its engine or None, its version or None, and how to fix it.

    With `measure`, a plugin may measure the rates of a chip if they are unknown, which takes seconds. `ok` is true,
    false, or "untested" if the engine was never tested, or not on this chip.
    """
    records = [
        _record("flagcore", _("the tuner"), version("flagcore"), ""),
        _record("python", _("3.10 or later"), platform.python_version(), _("install a newer Python")),
    ]
    with loaded_plugins(()) as loaded:
        chip_by_name = {chip.name: chip for device in loaded.devices() if (chip := loaded.find_chip(device.chip))}
        chips_by_name = {name: loaded.measured_chip(chip) if measure else chip for name, chip in chip_by_name.items()}
        for name in plugins.names(plugins.ENGINES):
            records += _engine(name, loaded, tuple(chips_by_name.values()))
        records += _support(loaded, tuple(chips_by_name.values()))
        found = _plugins(loaded)
    for plugin in found:
        name, problem = plugin["distribution"] or plugin["name"], plugin["problem"] or ""
        records.append(_record(name, _("plugin {name}", name=plugin["name"]), plugin["version"], problem))
        if plugin["undetected"]:
            purpose = _("devices of plugin {name}", name=plugin["name"])
            records.append(_record(name, purpose, None, plugin["undetected"]))
    records += [_record(name, _("extensions of flagcore"), None, error) for name, error in plugins.broken_parts()]
    return records


def verdict(records: Sequence[Mapping[str, Any]]) -> str:
    """Return which engines can run here according to records of `doctor`, and what to do for the others."""
    engines = dict.fromkeys(each["engine"] for each in records if each["engine"])
    problems = {name: [each for each in records if each["engine"] == name and not each["ok"]] for name in engines}
    ready = ", ".join(name for name, missing in problems.items() if not missing)
    fixes = "; ".join(f"{name}: {missing[0]['fix']}" for name, missing in problems.items() if missing)
    others = ", ".join(f"{each['name']} ({each['for']})" for each in records if not (each["engine"] or each["ok"]))
    lines = [_("Ready: {engines}.", engines=ready) if ready else _("No engine is ready.")]
    lines += [_("Not ready: {engines}.", engines=fixes)] if fixes else []
    lines += [_("Other problems: {names}; see the table.", names=others)] if others else []
    return "\n".join(lines)


def require_chip(spec: SpecLike) -> None:
    """Raise UsageError if a plan of a valid `spec` needs the name of a chip: it has none, and nothing is found here."""
    data = spec_data(spec)[1]
    cluster, envs = (each if isinstance(each := data.get(key), Mapping) else {} for key in ("cluster", "envs"))
    if cluster.get("groups") or cluster.get("chip", AUTO) != AUTO:
        return
    with loaded_plugins(()) as loaded:
        if loaded.vendor({name: str(value) for name, value in envs.items()}) or loaded.detection_failures():
            return  # the plan itself names the failures
        found, engine = {device.chip for device in loaded.devices()}, plugins.first_engine()
        chips = [chip for name in sorted(found) if (chip := loaded.find_chip(name))]
        own = [chip.name for chip in chips if loaded.engine_support(chip, engine).shared_devices]
    if len(own) == len(found):
        read_spec(spec)  # a misspelt section may be why it has no chip
        text = N_(
            "no accelerator was found here; name the chip to plan for with --chip; `flag plugins chips` lists all"
        )
        this = _("; `--chip {chip}` plans for this machine", chip=own[0]) if own else ""
        raise UsageError(_(text) + this)


def _engine(name: str, loaded: plugins.LoadedPlugins, chips: Sequence[Chip]) -> Iterator[dict[str, Any]]:
    """Yield one record per module that an engine needs. The fix names the vendor's build for `chips`, or else the extra
    of flagcore, or else the package."""
    try:
        engine = plugins.find_engine(name)
    except FlagError as error:
        yield _record(name, _("engine"), None, str(error), engine=name)
        return
    builds = [build for chip in chips if (build := loaded.engine_support(chip, name).install)]
    has_extra = any(name in (each.metadata.get_all("Provides-Extra") or ()) for each in distributions(name="flagcore"))
    fix = "; ".join(map(_, dict.fromkeys(builds))) or f"pip install 'flagcore[{name}]'" * has_extra
    for module, requirement in engine.modules.items():
        own_fix = fix or _("install {package}, which no extra of flagcore brings", package=requirement)
        purpose = _("engine {name} ({module})", name=name, module=module)
        yield {**_untested(_distribution(requirement, purpose, own_fix), engine.untested), "engine": name}


def _support(loaded: plugins.LoadedPlugins, chips: Sequence[Chip]) -> Iterator[dict[str, Any]]:
    """Yield records on the support of each engine on each of `chips`, and on problems of the chip's software."""
    for chip in chips:
        if rates := _rates_text(chip):
            yield _record(chip.name, _("rates of matrix products"), rates, "")
        preload: dict[tuple[str, ...], str] = {}
        for engine in plugins.names(plugins.ENGINES):
            answer, reason = loaded.engine_support(chip, engine), ""
            with suppress(FlagError):
                reason = plugins.find_engine(engine).untested
            if answer.support is Support.UNKNOWN:
                reason = answer.reason
            purpose = _("engine {name} on this chip", name=engine)
            fix = f"{_(answer.support.value)}: {_(answer.reason)}"
            runs = answer.support in (Support.YES, Support.UNKNOWN)
            yield _untested(_record(chip.name, purpose, answer.device_type, fix, runs, engine), reason)
            if answer.preload:
                preload.setdefault(answer.preload, engine)
        for modules, engine in preload.items():
            problem = _import_problem("torch", *modules)
            purpose = _("engine {name} on this chip ({module})", name=engine, module=", ".join(modules))
            yield _record(chip.name, purpose, None if problem else _("imported"), problem)
        for problem in loaded.health(chip):
            yield _record(chip.name, _("software of the chip"), None, problem)


def _import_problem(*modules: str) -> str:
    """Return why the modules cannot be imported in this order, or "". Another process imports them, and may crash."""
    command = (sys.executable, "-c", f"import {', '.join(modules)}")
    run = partial(subprocess.run, command, capture_output=True, text=True, errors="replace", timeout=IMPORT_SECONDS)
    try:
        done = within(IMPORT_SECONDS + 5.0, run)  # a process that is stuck in a driver cannot be killed
    except (subprocess.TimeoutExpired, TooSlow):
        return f"the import of {', '.join(modules)} did not end within {IMPORT_SECONDS:g} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else lines[-1] if lines else f"exit status {done.returncode}"


def _chip(loaded: plugins.LoadedPlugins, chip: Chip) -> dict[str, Any]:
    """Return a chip as plain data, in GiB, GB/s, TFLOP/s and watts. Unknown figures are None."""

    def scaled(fact: Fact | None, unit: float) -> float | None:
        return fact.value / unit if fact else None

    best = usual_precision(chip)
    return {
        "chip": chip.name,
        "plugin": loaded.owner(chip.name),
        "aliases": list(chip.aliases),
        "architecture": chip.architecture or None,
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
        "tdp_watts": scaled(chip.tdp_watts, 1.0),
    }


def _rates(chip: Chip) -> list[dict[str, Any]]:
    """Return a record for each precision of a chip: its peak with the source, and its speed relative to fp32."""
    return [
        {
            "precision": name,
            "tflops": fact.value / 1e12,
            "source": fact.source.kind,
            "detail": fact.source.detail,
            "times_slower_than_fp32": max(slowness(chip, name), 1.0),
        }
        for name, fact in chip.dense_flops_per_second.items()
    ]


def _slow_text(chip: Chip) -> str:
    """Return the rates of the precisions without a fast kernel, or an empty string if all are fast."""
    text = N_("{precision}: {rate}, {ratio} times slower than fp32")
    slow = [each for each in _rates(chip) if each["precision"] in TRAINED and each["times_slower_than_fp32"] >= 1.05]
    ratios = [(each["precision"], _rate_text(each["tflops"]), each["times_slower_than_fp32"]) for each in slow]
    return "; ".join(_(text, precision=name, rate=rate, ratio=f"{ratio:.2g}") for name, rate, ratio in ratios)


def _rates_text(chip: Chip) -> str:
    fast = [each for each in _rates(chip) if each["precision"] in TRAINED and each["times_slower_than_fp32"] == 1.0]
    texts = [f"{each['precision']}: {_rate_text(each['tflops'])} ({_(each['source'])})" for each in fast]
    return "; ".join(filter(None, [*texts, _slow_text(chip)]))


def _rate_text(tflops: float) -> str:
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1.0 else f"{1e3 * tflops:.{0 if tflops >= 0.01 else 1}f} GFLOP/s"


def _device(loaded: plugins.LoadedPlugins, device: Device, chip: Chip | None) -> dict[str, Any]:
    """Return a detected device and its chip's peak rates as plain data. Unknown values are None."""
    flops = chip.dense_flops_per_second if chip else {}
    best = usual_precision(chip) if chip else None
    return {
        "index": device.index,
        "name": device.chip,
        "chip": chip.name if chip else None,
        "plugin": loaded.owner(device.chip) if chip else loaded.finder(device),
        "uuid": device.uuid or None,
        "memory_gib": device.memory_bytes / 2**30 if device.memory_bytes else None,
        **_now(loaded, device),
        "peak_tflops": flops[best].value / 1e12 if best else None,
        "peak_precision": best,
        "peak_source": flops[best].source.kind if best else None,
        "peak_detail": flops[best].source.detail if best else None,
        "rates": _rates(chip) if chip else [],
        "slow_precisions": (_slow_text(chip) if chip else "") or None,
        "driver": device.driver or None,
        "aliases": list(chip.aliases) if chip else [],
    }


def _now(loaded: plugins.LoadedPlugins, device: Device) -> dict[str, Any]:
    """Return the memory in use and the processes of a device, from its telemetry. Unknown values are None."""
    figures: Mapping[str, float] = {}
    use: tuple[str, ...] = ()
    if reader := loaded.telemetry(device):
        with suppress(FlagError, LookupError):
            figures = reader.sample()
            found = device_use(reader)
            use = (*found.processes, found.blocked, found.pending)
    in_use = figures.get(MEMORY_IN_USE)
    return {"in_use_gib": None if in_use is None else in_use / 2**30, "use": "; ".join(filter(None, use)) or None}


def _record(
    name: str, purpose: str, found: str | None, fix: str, ok: bool | None = None, engine: str | None = None
) -> dict[str, Any]:
    """Return a record of `doctor`. By default, it is ok if a version was found."""
    ok = found is not None if ok is None else ok
    return {"name": name, "for": purpose, "engine": engine, "version": found, "ok": ok, "fix": "" if ok else fix}


def _untested(part: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return a record of `doctor`, with `ok` set to "untested" if there is a reason and the record is ok."""
    return {**part, "ok": _("untested"), "fix": _(reason)} if part["ok"] and reason else part


def _distribution(requirement: str, purpose: str, fix: str) -> dict[str, Any]:
    """Return a record of an installed distribution. It is not ok if it is missing or has another version."""
    from packaging.requirements import Requirement  # plans ask this module, too

    wanted, installed = Requirement(requirement), None
    with suppress(PackageNotFoundError):
        installed = version(wanted.name)
    ok = installed is not None and wanted.specifier.contains(installed, prereleases=True)
    return _record(wanted.name, purpose, installed, fix, ok)


def host_check(files: Sequence[str], variables: Mapping[str, str] | None, *, compare: bool = True) -> HostCheck:
    """Return what is checked on hosts. With `compare`, speeds are compared if the program for it is installed."""
    speed: tuple[str, ...] = ()
    with suppress(NoDevice):
        speed = (sys.executable, "-m", plugins.benchmark("links")) if compare else ()
    return HostCheck(files=files, variables=variables, speed=speed)


def check_hosts(hostfile: Path, launcher: str = "ssh") -> list[dict[str, Any]]:
    """Return one record per host of a host file: its problem, if any, its devices, versions and speed.

    Raises SpecError if the file cannot be read, and UsageError if the launcher does not use hosts.
    """
    lines = read_hosts(hostfile, file=str(hostfile))
    kinds, users = {line.host: line.kind for line in lines}, {line.host: line.user for line in lines if line.user}
    return plugins.launcher(launcher).report_hosts(kinds, users, host_check((), {}))
