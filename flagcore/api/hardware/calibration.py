"""Measure the devices of this machine, and save the results for predictions."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from flagcore import __version__, plugins
from flagcore.api.common.calibrated_plugins import VENDOR, facts_of, uncatalogued
from flagcore.api.common.inputs import loaded_plugins, warn
from flagcore.api.common.machine_load import Load, busy
from flagcore.calibration import Calibration, Calibrations, Experience
from flagcore.contracts import RunningLaunch
from flagcore.domain.chip import Chip, Device
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Exit, Launch
from flagcore.errors import Interrupted, NoDevice, RunError, UsageError
from flagcore.i18n import _, did_you_mean
from flagcore.plugins import LoadedPlugins
from flagcore.report.page.run import tail
from flagcore.stages.discover import best_chip

PROGRAM = "flagcore.microbench"
SECONDS = 90.0
GRACE_SECONDS = 120.0
"""Seconds for the start and the end of the program, in addition to the measurements."""

UNPUBLISHED = ("bf16", "fp16", "fp32")
"""What is measured of a chip without published rates."""


def calibrate(
    *,
    seconds: float = SECONDS,
    devices: int | None = None,
    without: Collection[str] = (),
    on_start: Callable[[str], object] | None = None,
) -> tuple[Calibration, Path]:
    """Measure kernels and collectives on this machine's devices in about `seconds`, and save the result.

    `devices` is the number of devices to use, by default all. Later predictions for the chip use the result. `on_start`
    is called with a line that describes the measurement. Returns the result and its file. Raises NoDevice if nothing
    can be measured, UsageError for more devices than there are, RunError if the measurement fails or cannot be saved,
    Interrupted.
    """
    if find_spec("torch") is None:
        raise NoDevice(_("torch is not installed; install its build for this device"))
    with loaded_plugins(without) as loaded:
        chip, support, here, engine = target(loaded)
        if devices is not None and devices > len(here):
            text = _(
                "--devices {asked}: this machine has {count} x {chip}", asked=devices, count=len(here), chip=chip.name
            )
            raise UsageError(text)
        count = devices or len(here)
        environment = dict(loaded.environment(chip, engine))
    calibrations_of_user = Calibrations.of_user()
    calibrations_of_user.check_writable()
    if on_start is not None:
        on_start(
            _("measuring {count} x {chip} for about {seconds:.0f} s", count=count, chip=chip.name, seconds=seconds)
        )
    load = Load()
    found = _measured(_job(chip, support, here, count, seconds), environment)
    others = load.by_others()
    warn(busy(others))
    made = _calibration(chip, here[0], count, found, others)
    if chip.vendor == VENDOR:
        made = replace(made, facts=facts_of(chip, support))
    return made, calibrations_of_user.save(made)


def _measured(job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Return what the program measures for a job. Raises RunError."""
    with tempfile.TemporaryDirectory(prefix="flagcore-") as folder:
        file, output = Path(folder, "job.json"), Path(folder, "found.json")
        file.write_text(json.dumps({**job, "output": str(output)}), encoding="utf-8")
        _run(
            Launch(
                argv=(sys.executable, "-m", PROGRAM, str(file)),
                folder=folder,
                environment=environment,
                timeout_seconds=2.0 * job["seconds"] + GRACE_SECONDS,
            )
        )
        try:
            found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(_("the measurement ended without a result: {reason}", reason=error)) from None
    return found


def calibrations() -> list[dict[str, Any]]:
    """Return a record for each saved calibration, and warn of files that cannot be read. Raises RunError."""
    saved = Calibrations.of_user()
    warn(error for _, error in saved.skipped_files())
    return [
        {
            "chip": each.chip,
            "devices": each.devices,
            "torch": each.torch,
            "driver": each.driver or None,
            "date": each.date,
            "kernels": sum("kernel" in row for row in each.rows),
            "collectives": sum("collective" in row for row in each.rows),
            "file": str(path),
        }
        for path, each in saved.all()
    ]


def summary(calibration: Calibration) -> list[dict[str, Any]]:
    """Return a record a kind of kernel: how many were measured, the best rate (a launch's time), the usual spread.

    The spread is the median over the kernels of what lies between the quartiles of a kernel's samples, in percent of
    their median.
    """
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in calibration.rows:
        name = str(row.get("kernel") or row["collective"])
        which = str(row.get("precision") or row.get("name") or f"{row.get('ranks')} ranks")
        kinds.setdefault((name, which), []).append(row)
    records = []
    for (name, which), rows in kinds.items():
        best, unit = _best(name, rows)
        spread = 100.0 * median(float(row["spread"]) for row in rows)
        figures = {"measured": len(rows), "best": best, "unit": unit, "spread_percent": spread}
        records.append({"what": f"{name} {which}", **figures})
    return records


def _best(name: str, rows: list[Mapping[str, Any]]) -> tuple[float, str]:
    if name == "launch":
        return min(float(row["us"]) for row in rows), "us"
    if "bytes" in rows[0]:
        return max(float(row["bytes"]) / float(row["us"]) for row in rows) / 1e3, "GB/s"
    if name == "gemm":
        return max(2e-6 * row["m"] * row["n"] * row["k"] / row["us"] for row in rows), "TFLOP/s"
    products = 1e-6 * (10.0 if name == "attention_backward" else 4.0) * 0.5
    work = (products * r["batch"] * r["heads"] * r["queries"] * r["keys"] * r["head_dim"] / r["us"] for r in rows)
    return max(work), "TFLOP/s"


def forget(chip: str) -> list[str]:
    """Delete the calibrations of `chip`, and what trials on it were measured at, and return their files.

    Raises RunError, UsageError if there are none.
    """
    kept = Calibrations.of_user()
    gone = (*kept.forget(chip), *Experience.of_user().forget(chip))
    if gone:
        return [str(path) for path in gone]
    names = sorted({each.chip for _, each in kept.all()})
    there = _("saved calibrations: {chips}", chips=", ".join(names) or _("none"))
    hint = did_you_mean(chip, names) or there
    raise UsageError(_("no calibration of {chip!r} in {folder}; {hint}", chip=chip, folder=kept.folder, hint=hint))


def target(loaded: LoadedPlugins) -> tuple[Chip, EngineSupport, tuple[Device, ...], str]:
    """Return the chip to measure, how torch runs on it, its devices, and the engine that reports it.

    One that no plugin catalogues takes precedence over a plain CPU.
    """
    found = loaded.devices()
    known = [chip for device in found if (chip := loaded.find_chip(device.chip))]
    engines = tuple(plugins.engines())  # those of flagcore first
    trains = next((name for name in engines if plugins.kind_of(name) == "train"), "")
    if all(loaded.engine_support(chip, trains).shared_devices for chip in known) and (
        uncatalogued_chip := uncatalogued(loaded)
    ):
        return (*uncatalogued_chip, trains)
    reasons = []
    for engine in engines:
        chip = best_chip(found, loaded, engine)
        support = loaded.engine_support(chip, engine)
        if support.device_type is not None and support.distributed_backend is not None:
            return chip, support, tuple(device for device in found if chip.has_name(device.chip)), engine
        reasons.append(support.reason)
    raise NoDevice("; ".join(reasons) or _("no engine is installed"))


def _job(chip: Chip, support: EngineSupport, here: tuple[Device, ...], count: int, seconds: float) -> dict[str, Any]:
    memory = [device.memory_bytes for device in here if device.memory_bytes]
    known = chip.memory_bytes
    return {
        "kind": support.device_type,
        "backend": support.distributed_backend,
        "preload": list(support.preload),
        "devices": count,
        "shared": support.shared_devices,
        "threads": len(here) // count,
        "precisions": list(chip.dense_flops_per_second) or list(UNPUBLISHED),
        "memory_bytes": min(memory) if memory else int(known.value) if known else 1 << 30,
        "seconds": seconds,
    }


def _run(launch: Launch) -> None:
    """Run the program to its end. Raises RunError with the last line of its log if it fails, Interrupted."""
    running: RunningLaunch | None = None
    ended: Exit | None = None
    try:
        running = plugins.launcher("local").start(launch)
        while ended is None:
            ended = running.wait(60.0)
    except KeyboardInterrupt:
        raise Interrupted(_("interrupted; nothing was saved")) from None
    finally:
        if running is not None and ended is None:
            running.stop()
    if ended.code == 0:
        return
    last = tail(Path(launch.folder, "stderr.log")).rpartition("\n")[2][:300]
    status = _("timed out") if ended.ended_by == "timeout" else _("exit status {code}", code=ended.code)
    raise RunError(_("the measurement failed: {reason}", reason=": ".join(filter(None, [status, last]))))


def _calibration(chip: Chip, device: Device, count: int, found: dict[str, Any], others: float) -> Calibration:
    how = f"flag calibrate of flagcore {__version__} in {found['seconds']:.0f} s, Python {platform.python_version()}"
    return Calibration(
        chip=chip.name,
        aliases=chip.aliases,
        driver=device.driver,
        torch=str(found["torch"]),
        devices=count,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        how=f"{how}, {platform.platform()}, others on {others:.0%} of the processors",
        rows=tuple(found["rows"]),
        others=others,
    )
