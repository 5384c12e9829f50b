"""Checks of figures and settings against a second entry of them: `tests/facts.yaml`.

A slip of a unit, a digit, a direction, a card or a letter is rarely made twice. The file has the figures of each chip
in the units of its source, and the names and values that the vendor's software uses:

```yaml
chips:
  A1: {memory: 64 GB, bandwidth: 1.6 TB/s, bf16: 600 TFLOP/s sparse, link: 400 GB/s both ways mesh, node: 8}
settings:
  device: acme
  backend: accl
  preload: torch_acme
  visible: ACME_VISIBLE_DEVICES
  pci: 1d0f 0x12
  files: dev/acme[0-9]*
  kubernetes: acme.com/npu
  variables: [GEMS_VENDOR=acme, ACME_OVERLAP=1]
  flags: --use-acme-overlap
```

After number and unit, words state what the number counts: `one way` or `both ways`, `dense` or `sparse`, `a card`,
`a node`, `of 4` (devices that share it), and how a link joins devices: `mesh`, `ring`, `switch`, `shared memory`.
`domain: 4, whole` is a link whose domains jobs take whole.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from flagcore_vendorkit.detection import DeviceDetector
from flagcore_vendorkit.engines import VariableKnob, all_knobs, read_engines
from flagcore_vendorkit.fields import build, read_yaml

from flagcore.domain.chip import Chip
from flagcore.domain.knob import Effect
from flagcore_testing.checks.bounds import BANDWIDTH, HOST, LINK, MEMORY, NIC, PEAK, USABLE, WATTS
from flagcore_testing.checks.detector import detector_of
from flagcore_testing.kit import Problems, Subject, check, need

FILE = "tests/facts.yaml"
KEYS = {MEMORY: "memory", BANDWIDTH: "bandwidth", LINK: "link", HOST: "host", NIC: "nic", WATTS: "power"}
KEYS[USABLE] = "usable"
"""The keys of the file, by those of a chip's figures. Peaks have the name of their format."""
COUNTS = {"node": "devices_per_node", "card": "devices_per_card", "domain": "link.domain_size"}
RATE = {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6, "Tb/s": 0.125e12, "Gb/s": 0.125e9}
BYTES = {"MiB": 2.0**20, "MB": 2.0**20, "GiB": 2.0**30, "GB": 2.0**30, "TB": 2.0**40}
UNITS = {
    "memory": BYTES,
    "usable": BYTES,
    "power": {"W": 1.0, "kW": 1e3},
    **dict.fromkeys(("bandwidth", "link", "host", "nic"), RATE),
}
PEAKS = {f"{prefix}{name}": size for prefix, size in (("T", 1e12), ("P", 1e15)) for name in ("FLOP/s", "OP/s")}
TEXT = re.compile(r"([\d,]*\d(?:\.\d+)?) ?([A-Za-z/]+)((?:,? [a-z]+| \d+)*)")
PCIE = re.compile(r"PCIe (\d)\.0 x(\d+)((?:,? [a-z]+| \d+)*)")
WORDS = re.compile(r"one way|both ways|dense|sparse|an? (?:device|card|node)|of \d+|mesh|ring|switch|shared memory")
JOINED = re.compile("mesh|ring|switch|shared memory")
DIRECTED, NARROW = ("link",), ("bf16", "fp16", "fp8", "fp4", "int8", "int4")
"""Figures that need a direction, and peaks that need `dense` or `sparse`."""
TOLERANCE = 0.012
"""Difference of a figure from its second entry: sources round to three digits."""


@dataclass(frozen=True)
class Facts:
    """The content of `tests/facts.yaml`."""

    chips: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def _facts(plugin: Subject) -> Facts:
    file = plugin.source / FILE
    need(file.is_file(), f"the plugin has no {FILE}")
    facts: Facts = build(Facts, read_yaml(file.read_text("utf-8"), FILE), FILE)
    return facts


@check(f"read the source again, and correct the figure or its second entry in {FILE}")
def figures_agree_with_their_second_entry(plugin: Subject) -> Problems:
    content, known = _facts(plugin).chips, {chip.name: chip for chip in plugin.own_chips()}
    for name in sorted(content.keys() - known.keys()):
        yield True, f"{FILE} has {name!r}, which is no chip of the plugin", "write the chip's name"
    for name, chip in known.items():
        entry = {key: str(value) for key, value in (content.get(name) or {}).items()}
        for path, fact in chip.figures.items():
            key = KEYS.get(path, path.removeprefix(PEAK))
            yield from _figure_problems(chip, key, path, fact.value, entry.pop(key, None))
        link = chip.link
        domain = f"{link.domain_size or ''}{', whole' if link.whole_domains else ''}" if link else ""
        for key, value in (("node", chip.devices_per_node), ("card", chip.devices_per_card), ("domain", domain)):
            text = entry.pop(key, "1" if key == "card" else "")
            shown = f"{FILE} has {key}: {text}" if text else f"{FILE} has no {key} of {chip.name}"
            yield text != str(value), f"{chip.name}: {COUNTS[key]} = {value or 'null'}, but {shown}"
        for key in sorted(entry):
            fix = "remove it, or add the figure"
            yield True, f"{FILE}: {chip.name} has {key!r}, which the chip's file does not have", fix


def _figure_problems(chip: Chip, key: str, path: str, value: float, text: str | None) -> Problems:
    """Yield how a figure differs from its second entry `text`, or why the entry cannot be read."""
    if text is None:
        fix = f"add {key} with the number and unit of its source, such as {_example(key)}"
        yield True, f"{FILE}: {chip.name} has no {key}, and {path} = {value:g}", fix
        return
    try:
        derived = _value(key, text, chip)
    except ValueError as error:
        yield True, f"{FILE}: {chip.name}.{key} = {text!r}: {error}", f"write for example {_example(key)}"
        return
    if key == "link" and chip.link and not PCIE.fullmatch(text):
        joined = (JOINED.search(text) or [""])[0].replace(" ", "-")
        is_other = joined != chip.link.topology and (joined or chip.link.topology != "pcie")
        yield is_other, f"{chip.name}: link.topology = {chip.link.topology}, but {FILE} has link: {text}"
    sizes = (derived, derived * 1e9 / 2**30) if key == "memory" and "GB" in text else (derived,)
    is_same = any(abs(value - size) < TOLERANCE * size for size in sizes)
    yield not is_same, f"{chip.name}: {path} = {value:g}, but {FILE} has {key}: {text}, which is {derived:.4g}"


def _value(key: str, text: str, chip: Chip) -> float:
    """Return a second entry in base units, for one device and one direction. Raises ValueError."""
    if key in ("link", "host") and (interface := PCIE.fullmatch(text)):
        value, words = 2.0 ** (int(interface[1]) - 1) * 2e9 * int(interface[2]) / 8, interface[3]
    else:
        found, units = TEXT.fullmatch(text), UNITS.get(key, PEAKS)
        if found is None or found[2] not in units:
            raise ValueError(f"the units are {', '.join(units)}")
        value, words = float(found[1].replace(",", "")) * units[found[2]], found[3]
        if key in DIRECTED and not re.search("one way|both ways", words):
            raise ValueError("write 'one way' or 'both ways'")
        if key in NARROW and not re.search("dense|sparse", words):
            raise ValueError("write 'dense' or 'sparse'")
    if left := WORDS.sub("", words).replace(",", "").strip():
        raise ValueError(f"unknown words {left!r}")
    for word in WORDS.findall(words):
        sharing = {"a card": chip.devices_per_card, "a node": chip.devices_per_node, "both ways": 2, "sparse": 2}
        value /= int(word[3:]) if word.startswith("of ") else sharing.get(word, 1)
    return value


def _example(key: str) -> str:
    examples = {"memory": "64 GB", "power": "400 W", "link": "400 GB/s both ways mesh", "host": "PCIe 5.0 x16"}
    return {**examples, "usable": "63.4 GiB", "nic": "200 Gb/s", "bandwidth": "1.6 TB/s"}.get(key, "300 TFLOP/s dense")


@check(f"read the vendor's files again, and correct the name or value, or its second entry in {FILE}")
def settings_agree_with_their_second_entry(plugin: Subject) -> Problems:
    section, used = _facts(plugin).settings, dict(_settings(plugin))
    for key in sorted({*section} - {*used}):
        yield True, f"{FILE}: settings has {key!r}", f"write {', '.join(used)}"
    for key, names in used.items():
        entry = section.get(key) or []
        listed = {str(each) for each in (entry if isinstance(entry, list) else [entry]) if each}
        for name in sorted({*names} - listed):
            yield f"{names[name]}: {name} is not among settings.{key} of {FILE}: {', '.join(sorted(listed)) or 'none'}"
        for name in sorted(listed - {*names}):
            yield f"{FILE}: settings.{key} has {name}, which no other file of the plugin has"


def _settings(plugin: Subject) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the names that the plugin's files use by their key in the second entry, each name with its file."""
    sections, detector = [*plugin.shipped("engines.yaml", read_engines).values()], detector_of(plugin)
    classes = detector.pci_classes if detector.pci_classes != DeviceDetector.pci_classes else ()
    rows: Iterable[tuple[str, str, Iterable[str | None]]] = (
        ("device", "engines.yaml", [each.device_type for each in sections]),
        ("backend", "engines.yaml", [each.distributed_backend for each in sections]),
        ("preload", "engines.yaml", [", ".join(each.preload) for each in sections]),
        ("visible", "discover.py", [", ".join(filter(None, (detector.outer, *detector.visible)))]),
        ("pci", "discover.py", [" ".join((format(int(str(detector.pci_vendor), 0), "04x"), *classes))]),
        ("files", "discover.py", [detector.device_file]),
        ("kubernetes", "engines.yaml", [each.kubernetes.name for each in sections if each.kubernetes]),
        ("flags", "knobs.yaml", [" ".join(effect.flags) for effect in _effects(plugin)]),
    )
    for key, file, names in rows:
        yield key, {name: file for name in names if name}
    yield "variables", _variables(plugin)


def _effects(plugin: Subject) -> list[Effect]:
    """Return the effects of the knobs that are no single variables."""
    knobs = [each.knob for each in all_knobs(plugin.package) if not isinstance(each.scope, VariableKnob)]
    return [effect for knob in knobs for effect in knob.effects.values()]


def _variables(plugin: Subject) -> dict[str, str]:
    """Return NAME=VALUE of each variable that the plugin sets, with its file."""
    scopes = [each.scope for each in all_knobs(plugin.package) if isinstance(each.scope, VariableKnob)]
    compared = {f"{each.variable}={' or '.join(map(str, each.values))}": "knobs.yaml" for each in scopes}
    values = {f"{key}={value}": "knobs.yaml" for each in _effects(plugin) for key, value in each.environment.items()}
    return (
        {f"{each.name}={each.value}": "environment.yaml" for each in plugin.variables if each.value} | values | compared
    )


SIZE = re.compile(r"(\d+(?:\.\d+)?)(?: to (\d+(?:\.\d+)?))? ?([KMG]i?B)\b")
POWERS = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}


@check("write the same size in both, such as 284 * 2**20 and 284 MiB")
def constants_have_the_size_that_they_state(plugin: Subject) -> Problems:
    for path in sorted(plugin.package_folder.glob("*.py")):
        module = sys.modules.get(f"{plugin.package}.{path.stem}")
        for line, names, text in _documented(ast.parse(path.read_text("utf-8")).body if module else []):
            ends = [(float(low), float(high or low), POWERS[unit[0]]) for low, high, unit in SIZE.findall(text)]
            for name, value in ((name, getattr(module, name, None)) for name in names if name.endswith("_BYTES")):
                if isinstance(value, int | float) and not any(0.95 * a <= value / by <= 1.05 * b for a, b, by in ends):
                    shown = ", ".join(match[0] for match in SIZE.finditer(text)) or "none"
                    where = f"{path.name}:{line}: {name} = {value / 2**20:.5g} MiB"
                    yield f"{where}, and the sizes in its docstring are {shown}"


def _documented(body: list[ast.stmt]) -> Iterator[tuple[int, list[str], str]]:
    """Yield the line and the names of each assignment that a text follows, and the text."""
    for line, after in pairwise(body):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(line, ast.Assign) and isinstance(text, str):
            names = [each.id for target in line.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            yield line.lineno, names, text
