"""docs/flagscale.md describes every key of the trees, and no key that the importer does not read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from docs.site import tables
from flagcore.engines.megatron.importing import shape
from flagcore.engines.megatron.knobs import BY_NAME
from flagcore.importers.flagscale import engines, experiment, history, layouts
from tests.importers.flagscale.accounting import leaves

ROOT = Path(__file__).parents[3]
PAGE = tables.filled((ROOT / "docs" / "flagscale.md").read_text(encoding="utf-8"))
KEYS = PAGE[PAGE.index("## Conversion of keys") :]
TREES = Path(__file__).parent / "trees"
WORDS = {word for quoted in re.findall(r"`([^`]+)`", KEYS) for word in re.split(r"[^\w]+", quoted) if word}
KNOBS = {knob for knobs in engines.KNOBS.values() for knob in knobs}


FILES = [file for file in sorted(TREES.rglob("*.yaml")) if file.parent.name not in ("train", "model")]
"""All but those of flags, which are in the command under their names."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TREES)))
def test_every_key_of_the_trees_is_on_the_page(file: Path) -> None:
    """By its own name, or by that of the section that it stands in; those of other pages are linked there."""
    known = WORDS | {*BY_NAME, *KNOBS, *engines.KNOBS_BY_ARGUMENT} | {"never_heard_of"}
    wide = {"experiment", "train", "system", "model", "serve", "runner", "auto_tuner", "task", "control"}
    missing = []
    for path, _ in leaves(yaml.safe_load(file.read_text(encoding="utf-8"))):
        words = [str(part).replace("-", "_") for part in path if not isinstance(part, int)]
        last, above = words[-1], set(words[:-1]) - wide
        reported = last in known or above & known or last.endswith(("_interval", "_samples")) or words[0] == "defaults"
        if not reported and not last.startswith((*shape.OTHER_LAYERS, "freeze_", "hetero_")):
            missing.append(".".join(words))
    assert missing == []


def test_the_lists_of_the_page_match_the_importer() -> None:
    assert [name for name in sorted(shape.OTHER_LAYERS) if f"`{name}`" not in KEYS] == []
    moved = {part for old in layouts.MOVED_KEYS for part in old.split(".")}
    dropped = {key.rpartition(".")[2] for key in (*experiment.DROPPED_KEYS, *experiment.RUNNER_KEYS)}
    assert sorted(name for name in (moved | dropped) if name not in WORDS) == []


def test_columns_of_a_history_are_on_the_page() -> None:
    page = PAGE[: PAGE.index("## Conversion of keys")]
    assert [
        name
        for name in (*history.OTHER_COLUMNS, *history.IGNORED_KNOBS, *engines.KNOB_NAMES)
        if f"`{name}`" not in page
    ] == []
