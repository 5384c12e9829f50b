"""The page about `flagcore.vendorkit` lists what exists, and all of it."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest

from flagcore import hooks as specifications
from flagcore.vendorkit.plugin import VendorPlugin
from flagcore.vendorkit.quirks import Quirks
from tests.pages import TEXT

PAGE = TEXT["docs/vendorkit.md"]
READERS = ("rows", "queries", "matrix", "smi", "detection", "machine")


@pytest.mark.parametrize("name", READERS)
def test_the_page_lists_every_function(name: str) -> None:
    module = import_module(f"flagcore.vendorkit.{name}")
    functions = {
        each for each, kind in vars(module).items() if inspect.isfunction(kind) and kind.__module__ == module.__name__
    }
    listed = " ".join(re.findall(rf"^\| `{name}` \| (.*) \|$", PAGE, re.MULTILINE))
    assert {each for each in functions if not each.startswith("_")} == set(
        re.findall(r"`([a-z_]+)`", listed)
    ) & functions
    assert set(re.findall(r"`([a-z]+_[a-z_]+)`", listed)) <= functions


def test_the_page_lists_every_section_of_the_quirks() -> None:
    assert set(re.findall(r"^\| `([a-z]+)` \| .* \| `flagcore_", PAGE, re.MULTILINE)) == set(Quirks.__annotations__)


def test_every_hook_on_the_page_is_one_that_plugins_answer() -> None:
    specified = set(re.findall(r"def (flagcore_[a-z_]+)", inspect.getsource(specifications)))
    hooks = set(re.findall(r"`(flagcore_[a-z_]+)`", PAGE))
    assert hooks <= specified
    assert {name for name in hooks if not hasattr(VendorPlugin, name)} == {"flagcore_pruning_rules"}
