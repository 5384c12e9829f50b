"""A healthy plugin of a vendor that does not exist, and ways to break exactly one thing of it."""

import importlib
import logging
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_testing.kit import Subject
from flagcore_testing.scaffold import new_plugin
from flagcore_vendorkit import chip_file, engines

CACHES: Any = (
    chip_file.load_chips,
    chip_file.shared_costs,
    engines.read_engines,
    engines.all_knobs,
    engines.read_maturity,
    engines.read_quirks,
    engines.read_variables,
)

HOOKS = "flagcore_acme/hooks.py"
DISCOVER = "flagcore_acme/discover.py"
CHIP = "flagcore_acme/chips/a1.yaml"
ENVIRONMENT = "flagcore_acme/environment.yaml"
QUIRKS = "flagcore_acme/quirks.yaml"
MATURITY = "flagcore_acme/maturity.yaml"
KNOBS = "flagcore_acme/knobs.yaml"
CURVE = "flagcore_acme/costs/a1/curve.yaml"
COLLECTIVES = "flagcore_acme/costs/a1/collectives.yaml"
FACTS = "tests/facts.yaml"
SOURCES = "tests/smi/sources.yaml"
ENGINES_FILE = "flagcore_acme/engines.yaml"
PYPROJECT = "pyproject.toml"
RUN_FILE = "flagcore_acme/published.jsonl"

MORE_HOOKS = '''

from dataclasses import replace

from flagcore.domain.chip import Device
from flagcore.hooks import hookimpl
from flagcore.physics.collective_costs import topology_of


class AcmePlugin(VendorPlugin):
    """Answers the hooks that no file answers, too."""

    @hookimpl
    def flagcore_topology(self, group):
        return topology_of(group) if self.owns(group.chip) and group.chip.link else None

    @hookimpl
    def flagcore_measured_chip(self, chip):
        return None


plugin = AcmePlugin(**vars(plugin))
'''
MORE_QUIRKS = """\
refused:
  - name: acme_no_block
    engine: megatron
    knob: recompute_method
    values: [block]
    reason: the vendor's Megatron has uniform recompute only
    source: *made_up
notes:
  - {note: the first step compiles for a minute, source: *made_up}
"""
MORE_KNOBS = """\
knobs:
  - name: acme_overlap
    engine: megatron
    says: collectives run on a copy engine
    default: false
    effect: {kind: estimated, method: a guess}
    choices: [{value: true, time: {value: 0.97, low: 0.9, high: 1.02}, environment: {ACME_OVERLAP: "1"}}]
    source: {kind: published, where: acme.example/guide}
"""
MORE_COLLECTIVES = """\
source: {kind: measured, how: tests of one node, software: accl 1.2, date: 2026-11-02}
curves:
  - kind: all_reduce
    ranks: 4
    payload_bytes: [1024, 1048576, 67108864, 1073741824]
    seconds: [1.2e-05, 3.1e-05, 6.9e-04, 9.8e-03]
"""


RUN = """\
{"id": "8 x A1, 2", "source": "https://example.com", "kind": "train", "model": {"num_layers": 32, "hidden_size": 4096, \
"ffn_hidden_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}, "cluster": {"chip": "%s", "devices": 8, \
"devices_per_node": 8}, "train": {"seq_length": 4096, "global_batch_size": 128, "precision": "bf16"}, \
"candidate": {"%s": 2}, "measured": {"step_time_s": %s}}
"""
"""A line of published.jsonl, without the chip, a knob and the time."""


@dataclass(frozen=True)
class Fault:
    """One edit: `new` replaces `old` in `file`. Empty `old`: append `new`; both empty: delete the file.

    `check` must fail and its message contain `names`. `also` are checks that fail with it, "*" any.
    """

    check: str
    file: str
    old: str
    new: str
    names: str
    also: tuple[str, ...] = ()


def healthy(folder: Path) -> Path:
    """Write the healthy plugin, with every hook and every file that one may have, and return its folder."""
    plugin_folder = new_plugin("acme", vendor="ACME", directory=str(folder))
    append(plugin_folder / HOOKS, MORE_HOOKS)
    append(plugin_folder / QUIRKS, MORE_QUIRKS)
    (plugin_folder / KNOBS).write_text(MORE_KNOBS)
    (plugin_folder / COLLECTIVES).write_text(MORE_COLLECTIVES)
    (plugin_folder / RUN_FILE).write_text((RUN % ("A1", "tensor_model_parallel_size", 30)).replace(", 2", "", 1))
    append(
        plugin_folder / ENVIRONMENT,
        "  - {name: ACME_QUEUES, value: '1', meaning: queues of a device, source: *made_up}\n",
    )
    edit(plugin_folder / FACTS, "GEMS_VENDOR=acme", "GEMS_VENDOR=acme, ACME_QUEUES=1, ACME_OVERLAP=1")
    edit(plugin_folder / ENVIRONMENT, "source: {kind", "source: &made_up {kind")
    edit(plugin_folder / MATURITY, "not_checked:", "  - {what: collectives of four devices, chips: [A1]}\nnot_checked:")
    return plugin_folder


def broken(folder: Path, source: Path, fault: Fault) -> Path:
    """Return a copy of the healthy plugin with one fault."""
    plugin_copy = folder / "flagcore-acme"
    shutil.copytree(source, plugin_copy)
    if not fault.old and not fault.new:
        (plugin_copy / fault.file).unlink()
    elif not fault.old:
        append(plugin_copy / fault.file, fault.new)
    else:
        edit(plugin_copy / fault.file, fault.old, fault.new)
    return plugin_copy


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + text)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1, f"{path.name} has no {old!r}"
    path.write_text(text.replace(old, new, 1))


@contextmanager
def imported(folder: Path) -> Iterator[Subject]:
    """Import the plugin in `folder` as if nothing of its name had been seen, and forget it and what it did again.

    A fault that has signals ignored would else be inherited by every program that later tests start.
    """
    path = list(sys.path)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handled, rounding, shown = list(logging.root.handlers), np.geterr(), warnings.filters[:]
    try:
        importlib.invalidate_caches()
        yield Subject(name="acme", hooks=importlib.import_module("flagcore_acme.hooks").plugin)
    finally:
        sys.dont_write_bytecode = before
        sys.path[:] = path
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        logging.root.handlers[:], warnings.filters[:] = handled, shown
        np.seterr(**rounding)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("flagcore_acme", "pymxsml")]:
            del sys.modules[name]
        for read in CACHES:
            read.cache_clear()
