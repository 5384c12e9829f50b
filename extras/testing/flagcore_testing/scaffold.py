"""Creates a plugin for a new vendor: a complete distribution from `template.txt`."""

import keyword
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from flagcore import __version__, plugins
from flagcore.errors import UsageError
from flagcore.loading.entry_points import installed, origin
from flagcore_testing.package import joined_texts

_NAME = (r"[a-z][a-z0-9_]*", "one word of lower-case letters, digits and '_' that begins with a letter")
RULES = {
    "vendor": (r"[A-Za-z0-9][\w.+-]*( [\w.+-]+)*", "words of Latin letters, digits, '-', '.', '+' and '_'"),
    "tool": (
        r"[A-Za-z][\w.+-]*( [\w.,:=+-]+)*",
        "a program on the PATH with its arguments, without quotes, such as 'acme-smi info'",
    ),
    "visible": (
        r"[A-Za-z_]\w*",
        "the name of an environment variable: Latin letters, digits and '_', such as ACME_VISIBLE_DEVICES",
    ),
    "torch-device": _NAME,
    "backend": _NAME,
    "preload": (r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "the name of a Python module, such as torch_acme"),
}
"""For each option, the pattern of valid values and the rule that messages state."""

SHARED_DEVICE = "cuda"
"""The device of torch that the builds of most vendors keep, with the backend nccl."""
BY_VERSION = """torch_device="{device}",
    trusts=lambda report: "+{name}" in report.version,"""
BY_ATTRIBUTE = """torch_device="{device}",
    torch_attributes=("{device}",),
    trusts=lambda report: "{device}" in report.attributes,"""
"""How the vendor's torch is recognized. Several vendors use the device `cuda`; another device identifies the vendor."""

MADE_UP = (
    "memory: 64 GB, bandwidth: 1.6 TB/s, fp32: 40 TFLOP/s, bf16: 300 TFLOP/s dense, fp16: 300 TFLOP/s dense, "
    "link: 400 GB/s both ways mesh, nic: 200 Gb/s, node: 8"
)
"""The made-up figures of a chip in `template.txt`, in the units of data sheets."""


def new_plugin(
    name: str,
    *,
    vendor: str | None = None,
    chips: Sequence[str] = (),
    tool: str | None = None,
    visible: str | None = None,
    torch_device: str | None = None,
    backend: str | None = None,
    preload: Sequence[str] = (),
    directory: str = ".",
) -> Path:
    """Write `directory`/flagcore-NAME and return it. Raises UsageError for an invalid value or an existing name."""
    _check_name(name)
    vendor = name.capitalize() if vendor is None else vendor
    tool = f"{name}-smi" if tool is None else tool
    visible = f"{name.upper()}_VISIBLE_DEVICES" if visible is None else visible
    chips = chips or (f"{name[0].upper()}1",)
    torch_device = SHARED_DEVICE if torch_device is None else torch_device
    backend = "nccl" if backend is None else backend
    values = {"vendor": vendor, "tool": tool, "visible": visible, "torch-device": torch_device, "backend": backend}
    for option, value in [*values.items(), *(("preload", module) for module in preload)]:
        pattern, rule = RULES[option]
        if not re.fullmatch(pattern, value, re.ASCII):
            raise UsageError(f"--{option} {value!r} must be {rule}")
    _check_chips(chips)
    folder = Path(directory) / f"flagcore-{name}"
    if folder.exists():
        raise UsageError(f"{folder} exists already; give another NAME or --directory, or remove it")
    modules = ", ".join(preload)
    words = {**_words(name, chips, values), "modules": modules, "preload": f", preload: [{modules}]" if preload else ""}
    try:
        for path, text in _rendered(words, chips):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    return folder


def _check_chips(chips: Sequence[str]) -> None:
    known = plugins.load_plugins()
    for number, chip in enumerate(chips):
        if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", chip, re.ASCII):
            word = re.sub(r"[^\w.+-]+", "-", chip, flags=re.ASCII).strip("-._+")
            hint = f"; name it {word}" if word else ""
            raise UsageError(f"--chip {chip!r} must be one word of Latin letters, digits, '-', '.', '+' and '_'{hint}")
        if chip.casefold() in (earlier.casefold() for earlier in chips[:number]):
            raise UsageError(f"--chip {chip!r} is given twice; give each chip once")
        if owner := known.owner(chip):
            raise UsageError(f"--chip {chip!r} is a chip of the plugin {owner} already; use the name of your chip")


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]{,39}", name) or name.endswith("_") or keyword.iskeyword(name):
        raise UsageError(
            f"NAME {name[:60]!r} must be at most 40 lower-case letters, digits and '_', begin with a letter, "
            "not end with '_', and be no keyword"
        )
    points = installed(plugins.GROUP)
    if name in points:
        distribution = origin(points[name][0]).metadata["Name"]
        raise UsageError(f"NAME {name!r} is an installed plugin (from {distribution}); use another name")
    if f"flagcore_{name}" in sys.modules or name in ("core", "testing"):
        raise UsageError(f"NAME {name!r} is taken; use another name")


def _words(name: str, chips: Sequence[str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each placeholder of the template, except placeholders that differ between chips."""
    device, program = values["torch-device"], values["tool"].split()[0]
    major, minor, *_ = __version__.split(".")
    return {
        "name": name,
        "Vendor": values["vendor"],
        "Class": name.title().replace("_", ""),
        "tool": program,
        "TOOL": program.upper(),
        "command": values["tool"],
        "visible": values["visible"],
        "device": device,
        "backend": values["backend"],
        "torch": (BY_VERSION if device == SHARED_DEVICE else BY_ATTRIBUTE).format(name=name, device=device),
        "chips": ", ".join(chips),
        "quoted_chips": ", ".join(f'"{chip}"' for chip in chips),
        "rows": "\n".join(f"| {chip} | TODO | TODO | TODO | `{program}` | TODO |" for chip in chips),
        "entries": "\n".join(f'  "{chip}": {{{MADE_UP}}}' for chip in chips),
        "release": f"{major}.{minor}",
        "next": f"{major}.{int(minor) + 1}",
    }


def _rendered(words: Mapping[str, str], chips: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file. If the path contains the chip, there is one file per chip."""
    template = files("flagcore_testing").joinpath("template.txt").read_text("utf-8")
    for pattern, text in joined_texts(template).items():
        for chip in chips if "@file@" in pattern else chips[:1]:
            chip_words = {**words, "chip": chip, "file": chip.casefold()}
            yield _filled(pattern, chip_words), _filled(text, chip_words)


def _filled(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda match: words[match[1]], text)
