"""Measured collectives of a plugin, read from YAML."""

import sys
from pathlib import Path

import pytest

from flagcore.domain.chip import Chip
from flagcore.errors import SpecError
from flagcore.physics.collective_curves import CollectiveTable
from flagcore.vendorkit.chip_file import collective_table, read_collectives

GOOD = """
level: node
source: {kind: measured, how: accl-tests, software: accl 1.2}
curves:
  - {kind: all_reduce, ranks: 8, payload_bytes: [1024, 1048576], seconds: [1.2e-05, 3.0e-05]}
  - {kind: send, ranks: 2, payload_bytes: [1048576], seconds: [4.0e-05]}
"""


def test_curves_are_read_with_their_source() -> None:
    table = read_collectives(GOOD, "collectives.yaml")
    assert isinstance(table, CollectiveTable)
    assert (table.level, table.source) == ("node", "measured: accl-tests, software accl 1.2")
    first, second = table.curves
    assert (first.kind, first.ranks, first.payload_bytes, first.seconds) == (
        "all_reduce",
        8,
        (1024.0, 1048576.0),
        (1.2e-05, 3.0e-05),
    )
    assert second.kind == "send"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("source: {kind: measured, how: accl-tests, software: accl 1.2}", ""), "source"),
        (("kind: all_reduce", "kind: broadcast"), "curves[0]"),
        (("ranks: 8", "ranks: 1"), "curves[0]"),
        (("kind: send, ranks: 2", "kind: send, ranks: 4"), "curves[1]"),
        (("[1024, 1048576]", "[1048576, 1024]"), "curves[0]"),
        (("[1024, 1048576]", "[1024]"), "curves[0]"),
        (("[1024, 1048576]", "[1 KiB, 1 MiB]"), "curves[0].payload_bytes[0]"),
        (("[1.2e-05, 3.0e-05]", "[12, 30]"), "curves[0]"),
        (("[1.2e-05, 3.0e-05]", "[-1.2e-05, 3.0e-05]"), "curves[0]"),
        (("kind: send, ranks: 2", "kind: all_reduce, ranks: 8"), "curves"),
        (("ranks: 8", "rank: 8"), "curves[0].ranks"),
        (("level: node", "levels: node"), "levels"),
    ],
)
def test_an_error_is_reported_with_its_key(change: tuple[str, str], key: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_collectives(GOOD.replace(*change), "collectives.yaml")
    assert caught.value.key == key


def test_a_file_without_curves_is_refused() -> None:
    with pytest.raises(SpecError, match="at least one curve"):
        read_collectives("source: {kind: measured, how: nothing}\n", "collectives.yaml")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that ships curves of the A1, and of chips that point at others."""
    for name, text in {
        "a1": GOOD,
        "a1-lite": "same_as: A1\nsource: {kind: estimated, method: the same switch}\n",
        "lost": "same_as: A9\nsource: {kind: estimated, method: a guess}\n",
        "round": "same_as: round\nsource: {kind: estimated, method: a guess}\n",
    }.items():
        folder = tmp_path / "curves_of_acme" / "costs" / name
        folder.mkdir(parents=True)
        (folder / "collectives.yaml").write_text(text)
    (tmp_path / "curves_of_acme" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "curves_of_acme", raising=False)
    return "curves_of_acme"


def test_chips_with_equal_links_share_curves(package: str) -> None:
    own, other = (collective_table(package, Chip(name=name, vendor="acme")) for name in ("A1", "A1-Lite"))
    assert own is not None
    assert other == own
    assert collective_table(package, Chip(name="A2", vendor="acme")) is None


@pytest.mark.parametrize("chip", ["Lost", "Round"])
def test_a_reference_to_a_chip_without_curves_is_reported(package: str, chip: str) -> None:
    with pytest.raises(SpecError) as caught:
        collective_table(package, Chip(name=chip, vendor="acme"))
    assert caught.value.key == "same_as"
