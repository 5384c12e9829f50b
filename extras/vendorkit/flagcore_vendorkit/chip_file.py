"""Reads the chip files of a plugin, with the chips' measured kernels and collectives.

`chips/*.yaml` has one file per chip, or several chips as the documents of one file, which has the start of their names
or the name of the vendor. Each figure has its source. A figure is `{value: NUMBER, source: {kind: KIND, ...}}` in
bytes, bytes per second or flops per second. Each kind of source requires one key: `how` if it is measured, `document`
for a datasheet, `where` if it is published, `method` if it is estimated. Other keys (page, software, date, repeats,
confidence) are added to the text of the source. A key whose value another chip of the plugin has, with the same source,
is `KEY: {same_as: CHIP}`.

The folder `costs/<chip>/`, where `<chip>` is the chip's name in lower case, contains:

- `collectives.yaml`: `source` as in a chip file, and `curves`, a list of `kind`, `ranks`, `payload_bytes` and
  `seconds`. They apply to the innermost level of the topology, or to the level that `level` names.
- `curve.yaml`: `curve`, parameters of `flagcore.physics.roofline.Curve`, and `source` as in a chip file. `of`
  is the data of the fit: `runs` (times of whole runs; the default), or `kernels` (kernels that were measured alone).
- `kernels.jsonl`: measured kernels, one per line (`flagcore_vendorkit.kernel_table`), with their time in `us`.
- `provenance.yaml`: `how`, `software`, `date`, the overhead of the measurement (`Reading`), and the `source` if others
  published the times.
- `serving.yaml`: like `curve.yaml`, for serving engines, if their kernels reach other shares.

In `costs/same_as.yaml`, `collectives.yaml`, `curve.yaml` and `serving.yaml` are lists of entries: the file of the chip
that `same_as` names also applies to the `chips`, for the reason that is the `source`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from flagcore.contracts import KernelCosts
from flagcore.domain.chip import Chip, NotNegative, Source
from flagcore.errors import SpecError
from flagcore.physics.collective_curves import CollectiveTable
from flagcore.physics.collective_curves import Curve as CollectiveCurve
from flagcore.physics.roofline import Curve, Roofline
from flagcore_vendorkit.fields import Content, build, documents, read_file, read_yaml
from flagcore_vendorkit.kernel_table import RUN_SLOWDOWN, SIZES, Kernel, KernelSheet, with_measured

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
KEYS = {"chip": "name", **{each.name: each.name for each in fields(Chip) if each.name != "name"}}
"""The fields of a chip by the keys of its file."""


@cache
def load_chips(package: str, name: str = "") -> tuple[Chip, ...]:
    """Return the chips in every `chips/*.yaml` of `package`, by file name, or those whose text has a normalized `name`.

    Raises SpecError for an invalid file of these chips.
    """
    entries = sorted(files(package).joinpath("chips").iterdir(), key=lambda entry: entry.name)
    texts = [
        (text, file)
        for entry in entries
        if entry.name.endswith(".yaml")
        for file, text in documents(entry.read_text("utf-8"), f"{package}/chips/{entry.name}")
    ]

    def read(chip: object) -> Content:
        """Return the content of the file of a chip that `same_as` names."""
        contents = (_content(*each) for each in texts if str(chip) in each[0])
        return next((each for each in contents if each.get("chip") == chip), {})

    has_name = re.compile(r"(?:[^\w+]|_)*".join(map(re.escape, name))).search
    chosen = [each for each in texts if has_name(each[0].casefold())]
    return tuple(_chip(_own(_content(text, file), file, read), file) for text, file in chosen)


_content = cache(read_yaml)


def read_chip(text: str, file: str) -> Chip:
    """Return the chip that `text` describes. Raises SpecError with `file`, key, value, rule and fix."""
    return _chip(read_yaml(text, file), file)


def _own(content: Content, file: str, others: Callable[[object], Content]) -> Content:
    """Return the content of a chip file with the values of other chips for `{same_as: CHIP}`. Raises SpecError."""
    own = dict(content)
    for key, value in content.items():
        if isinstance(value, dict) and "same_as" in value:
            name = value["same_as"]
            own[key] = others(name).get(key)
            if value.keys() != {"same_as"} or not isinstance(own[key], dict) or "same_as" in own[key]:
                problem = f"must be the only key, and name a chip of this plugin with a {key} of its own"
                raise SpecError(file=file, key=f"{key}.same_as", value=name, problem=problem)
    return own


def _chip(content: Content, file: str) -> Chip:
    chip: Chip = build(Chip, content, file, names=KEYS)
    for name in chip.dense_flops_per_second:
        if name not in PRECISIONS:
            fix = f"the names are {', '.join(PRECISIONS)}"
            raise SpecError(file=file, key=f"dense_flops_per_second.{name}", problem="unknown precision", fix=fix)
    return chip


SHARED = "costs/same_as.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """An entry of `costs/same_as.yaml`: a file of a chip also applies to other chips. `source`: why."""

    same_as: str
    chips: tuple[str, ...]
    source: Source


@cache
def shared_costs(package: str) -> Mapping[tuple[str, str], str]:
    """Return the chip whose file applies, by chip and file, from `costs/same_as.yaml`. Names are in lower case.

    Raises SpecError for an invalid file.
    """
    file, found = f"{package}/{SHARED}", dict[tuple[str, str], str]()
    kind = Mapping[Literal["collectives.yaml", "curve.yaml", "serving.yaml"], tuple[SharedFile, ...]]
    for name, listed in build(kind, read_file(package, SHARED) or {}, file).items():
        for place, entry in enumerate(listed):
            found.update({(chip.casefold(), name): entry.same_as.casefold() for chip in entry.chips})
            if not files(package).joinpath(f"costs/{entry.same_as.casefold()}/{name}").is_file():
                key = f"{name}[{place}].same_as"
                raise SpecError(file=file, key=key, value=entry.same_as, problem=f"this chip has no {name} of its own")
    return found


def cost_file(package: str, chip: Chip, name: str) -> tuple[str, str] | None:
    """Return the text of the file of costs that applies to a chip, and its path. None if there is no file.

    Raises SpecError for an invalid `costs/same_as.yaml`.
    """
    folder = chip.name.casefold()
    path = f"costs/{shared_costs(package).get((folder, name), folder)}/{name}"
    file = files(package).joinpath(path)
    return (file.read_text("utf-8"), f"{package}/{path}") if file.is_file() else None


@dataclass(frozen=True, kw_only=True)
class CollectiveFile:
    """The content of a `collectives.yaml`."""

    source: Source
    level: str = ""
    curves: tuple[CollectiveCurve, ...] = ()


def collective_table(package: str, chip: Chip) -> CollectiveTable | None:
    """Return the measured collectives that `package` has for `chip`, or None. Raises SpecError for an invalid file."""
    found = cost_file(package, chip, "collectives.yaml")
    return read_collectives(*found) if found else None


def read_collectives(text: str, file: str) -> CollectiveTable:
    """Return the table that `text` describes. Raises SpecError with `file`, key, value, rule and fix."""
    found: CollectiveFile = build(CollectiveFile, read_yaml(text, file), file)
    source = f"{found.source.kind}: {found.source.detail}"
    try:
        return CollectiveTable(level=found.level, curves=found.curves, source=source)
    except ValueError as error:
        raise SpecError(file=file, key="curves", problem=str(error)) from None


BUSY_SIDE = 1024.0
"""Minimum side of a matrix product that is limited by arithmetic. A higher clock does not speed up smaller ones."""
OF = {"runs": 1.0, "kernels": RUN_SLOWDOWN}
"""The ratio of kernel times in a run to the times of the curve, by the data to which the curve was fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFile:
    """The content of a `curve.yaml` or `serving.yaml`. `of`: what the curve was fitted to; sets `run_slowdown`."""

    source: Source
    curve: Curve
    of: Literal["runs", "kernels"] = "runs"

    def __post_init__(self) -> None:
        if self.curve.run_slowdown != Curve().run_slowdown:
            raise ValueError("a curve must not set run_slowdown: `of` determines it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """The effect of a lower clock in long measurements: times far above `after_us` are too long by the share `by`."""

    after_us: NotNegative
    by: NotNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Corrections of measured kernel times. Times are in microseconds.

    `event_us` is the overhead in every measured time. If a time is at most `host_us` of its kind of kernel, the host
    was slower than the device, so the time is an upper bound. `slowed` kernels were measured at a lower clock, because
    a long run of a single kernel heats the chip more than training does. `in_training` is the time of a kernel in a
    training step relative to its time alone, for products that are limited by arithmetic.
    """

    event_us: NotNegative = 0.0
    host_us: Mapping[str, NotNegative] = field(default_factory=dict)
    slowed: Mapping[str, Slowed] = field(default_factory=dict)
    in_training: Mapping[str, NotNegative] = field(default_factory=dict)

    def kernel(self, name: str, precision: str, sizes: tuple[float, ...], seconds: float) -> Kernel:
        """Return a kernel with its corrected time, which is the device's own time."""
        bound = seconds <= self.host_us.get(name, 0.0) * 1e-6
        if name != "launch":
            seconds = max(seconds - self.event_us * 1e-6, 0.1 * seconds)
        if name in self.slowed:
            slowed = self.slowed[name]
            seconds /= 1.0 + slowed.by / (1.0 + (slowed.after_us * 1e-6 / seconds) ** 4)
        if name in self.in_training:
            seconds *= self.in_training[name] ** min(min(sizes) / BUSY_SIDE, 1.0)
        return Kernel(name=name, precision=precision, sizes=sizes, seconds=seconds, bound=bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance(Reading):
    """The content of `provenance.yaml`."""

    how: str
    software: Mapping[str, Any]
    date: Any
    schema: int = 1
    notes: str = ""
    source: Source | None = None
    """Where others published the times. None means that the plugin's authors measured them."""


def kernel_costs(package: str, chip: Chip, kind: str = "train") -> KernelCosts | None:
    """Return the kernel times that `package` ships for `chip`: a table, a roofline with the chip's curve, or None.

    In engines of the kind `serve`, a shipped curve for serving comes first. Raises SpecError for an invalid file.
    """
    if kind == "serve" and (serving := _curve(package, chip, "serving.yaml")):
        return Roofline(chip=chip, curve=serving)
    curve = _curve(package, chip, "curve.yaml")
    kernels, provenance = (cost_file(package, chip, name) for name in ("kernels.jsonl", "provenance.yaml"))
    if kernels is None:
        return Roofline(chip=chip, curve=curve) if curve else None
    if provenance is None:
        file = kernels[1].replace("kernels.jsonl", "provenance.yaml")
        raise SpecError(file=file, key="the file", problem="is missing next to kernels.jsonl")
    sheet = read_kernels(*kernels, read_provenance(*provenance))
    return with_measured(Roofline(chip=chip, curve=curve or Curve()), sheet)


def _curve(package: str, chip: Chip, name: str) -> Curve | None:
    found = cost_file(package, chip, name)
    return read_curve(*found) if found else None


def read_curve(text: str, file: str) -> Curve:
    """Return the curve of a `curve.yaml`. Raises SpecError with `file`, key, value, rule and fix."""
    found: CurveFile = build(CurveFile, read_yaml(text, file), file)
    return replace(found.curve, run_slowdown=OF[found.of])


def read_provenance(text: str, file: str) -> Provenance:
    """Return the corrections for the times that a `provenance.yaml` describes. Raises SpecError for an invalid file."""
    found: Provenance = build(Provenance, read_yaml(text, file), file)
    return found


def read_kernels(text: str, file: str, reading: Reading) -> KernelSheet:
    """Return the kernels of a `kernels.jsonl`, with times corrected as by `Reading.kernel`. Raises SpecError with the
    number of the invalid line."""
    kernels = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                kernels.append(read_kernel(json.loads(line), reading))
            except (ValueError, TypeError, KeyError) as error:
                problem = f"is not a measured kernel: {error!r}"
                raise SpecError(file=file, key=f"line {number}", value=line[:80], problem=problem) from error
    return KernelSheet(tuple(kernels))


def read_kernel(record: Mapping[str, Any], reading: Reading) -> Kernel:
    """Return the kernel of one line of a `kernels.jsonl`. Raises ValueError, TypeError or KeyError if it is invalid."""
    name = record["kernel"]
    if name not in SIZES:
        raise ValueError(f"unknown kernel {name!r}; use one of {', '.join(SIZES)}")
    sizes = tuple(float(record[size]) for size in SIZES[name])
    seconds = float(record["us"]) * 1e-6
    if not all(0 < number < float("inf") for number in (seconds, *sizes)):
        raise ValueError("sizes and us must be finite and above 0")
    return reading.kernel(name, str(record.get("precision", "")), sizes, seconds)
