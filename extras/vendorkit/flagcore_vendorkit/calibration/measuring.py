"""Measures the devices of this machine, and saves the results for predictions."""

import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from flagcore import plugins
from flagcore.api.inputs import loaded_plugins
from flagcore.api.notes import warn
from flagcore.domain.chip import Chip, Device
from flagcore.domain.engine import EngineSupport, device_variables
from flagcore.domain.launch import Launch, log_tail
from flagcore.errors import Interrupted, NoDevice, RunError, UsageError
from flagcore.i18n import N_, _
from flagcore.plugins import benchmark, target
from flagcore_vendorkit.calibration.overlay import VENDOR, busy
from flagcore_vendorkit.calibration.store import Calibration, Calibrations

SECONDS = 90.0
LOAD_SECONDS = 0.5
"""Seconds in which the load of the processors is measured before the program starts."""
GRACE_SECONDS = 120.0
"""Additional seconds that the start and the end of the program may take."""

UNPUBLISHED = ("bf16", "fp16", "fp32")
"""The precisions that are measured on a chip without published rates."""


def calibrate(
    *,
    seconds: float = SECONDS,
    devices: int | None = None,
    without: Collection[str] = (),
    on_start: Callable[[str], object] | None = None,
) -> tuple[Calibration, Path]:
    """Measure kernels and collectives on this machine's devices for about `seconds`, and save the result.

    `devices`: number of devices to use; by default all. `on_start`: called with a line that describes the measurement.
    Later predictions for the chip use the result. Returns the result and its file. Raises NoDevice if there is no
    usable device, UsageError if `devices` is larger than the number of devices, RunError if the measurement fails or
    cannot be saved, and Interrupted.
    """
    if find_spec("torch") is None:
        raise NoDevice(_("torch is not installed; install its build for this device"))
    with loaded_plugins(without) as loaded:
        chip, support, chip_devices, engine = target(loaded)
        if devices is not None and devices > len(chip_devices):
            text = N_("--devices {asked}: this machine has {count} x {chip}")
            raise UsageError(_(text, asked=devices, count=len(chip_devices), chip=chip.name))
        count = devices or len(chip_devices)
        environment = {**loaded.environment(chip, engine), **device_variables(support, chip_devices[:count])}
        warn(loaded.health(chip))
    calibrations_of_user = Calibrations.of_user()
    calibrations_of_user.check_writable()
    if on_start is not None:
        text = N_("measuring {count} x {chip} for about {seconds:.0f} s")
        on_start(_(text, count=count, chip=chip.name, seconds=seconds))
    other_load = psutil.cpu_percent(LOAD_SECONDS) / 100.0
    warn(busy(other_load))
    job = {**devices_of_job(support, chip_devices, count), **limits_of_job(chip, chip_devices), "seconds": seconds}
    measurements = run_benchmark("kernels", job, environment, 2.0 * seconds + GRACE_SECONDS)
    calibration = _calibration(chip, chip_devices[0], count, measurements, other_load)
    if chip.vendor == VENDOR:
        facts = {
            "memory_bytes": chip.memory_bytes.value if chip.memory_bytes else None,
            "devices_per_node": chip.devices_per_node,
            "device_type": support.device_type,
            "distributed_backend": support.distributed_backend,
        }
        calibration = replace(calibration, facts=facts)
    return calibration, calibrations_of_user.save(calibration)


def run_benchmark(name: str, job: Mapping[str, Any], environment: Mapping[str, str], timeout_seconds: float) -> Any:
    """Run a benchmark program with a job and return its measurements. Raises RunError with the last line of its log
    if it fails, and Interrupted."""
    with tempfile.TemporaryDirectory(prefix="flagcore-") as folder:
        file, output = Path(folder, "job.json"), Path(folder, "found.json")
        file.write_text(json.dumps({**job, "output": str(output)}), encoding="utf-8")
        argv = (sys.executable, "-m", benchmark(name), str(file))
        try:
            trial = plugins.launcher("local").start(
                Launch(argv=argv, folder=folder, environment=environment, timeout_seconds=timeout_seconds)
            )
            try:
                trial.wait(math.inf)
            finally:
                ended = trial.stop()
        except KeyboardInterrupt:
            raise Interrupted(_("interrupted; nothing was saved")) from None
        if ended.code:
            last_line = log_tail(folder).rstrip().rpartition("\n")[2][:300]
            status = _("timed out") if ended.ended_by == "timeout" else _("exit status {code}", code=ended.code)
            reason = ": ".join(filter(None, [status, last_line]))
            raise RunError(_("the measurement failed: {reason}", reason=reason))
        try:
            return json.loads(output.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(_("the measurement has no result: {reason}", reason=error)) from None


def calibrations() -> list[dict[str, Any]]:
    """Return a record for each saved calibration, and warn about files that cannot be read. Raises RunError."""
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
    """Return one record per kind of kernel or collective: number of measurements, best rate and spread.

    For `launch`, the best time replaces the rate. The spread is the median over the kernels of the interquartile range
    of the samples, in percent of their median.
    """
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in calibration.rows:
        detail = row.get("precision") or row.get("name") or f"{row.get('ranks')} ranks"
        kinds.setdefault(f"{row.get('kernel') or row['collective']} {detail}", []).append(row)
    records = []
    for what, rows in kinds.items():
        best, unit = _best(what.partition(" ")[0], rows)
        spread = 100.0 * median(float(row["spread"]) for row in rows)
        records.append({"what": what, "measured": len(rows), "best": best, "unit": unit, "spread_percent": spread})
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


def devices_of_job(support: EngineSupport, here: Sequence[Device], count: int) -> dict[str, Any]:
    """Return what all benchmark programs need to know of `count` devices, as plain data."""
    return {
        "kind": support.device_type,
        "backend": support.distributed_backend,
        "preload": list(support.preload),
        "devices": count,
        "shared": support.shared_devices,
        "threads": len(here) // count,
    }


def limits_of_job(chip: Chip, here: Sequence[Device]) -> dict[str, Any]:
    """Return the precisions and the memory limit of the kernels to measure, as plain data."""
    memory = [device.memory_bytes for device in here if device.memory_bytes]
    memory_fact = chip.memory_bytes
    return {
        "precisions": list(chip.dense_flops_per_second) or list(UNPUBLISHED),
        "memory_bytes": min(memory) if memory else int(memory_fact.value) if memory_fact else 1 << 30,
    }


def _calibration(chip: Chip, device: Device, count: int, found: dict[str, Any], others: float) -> Calibration:
    """Return the calibration of a chip from the results of the benchmark program on `count` devices."""
    tuner = f"flag calibrate of flagcore {version('flagcore')}"
    method = f"{tuner} in {found['seconds']:.0f} s, Python {platform.python_version()}"
    return Calibration(
        chip=chip.name,
        aliases=chip.aliases,
        driver=device.driver,
        torch=str(found["torch"]),
        devices=count,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        how=f"{method}, {platform.platform()}, others on {others:.0%} of the processors",
        rows=tuple(found["rows"]),
        others=others,
    )
