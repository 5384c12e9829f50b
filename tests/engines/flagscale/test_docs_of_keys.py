"""docs/flagscale.md describes every column of a history that the importer reads."""

from pathlib import Path

from flagcore_flagscale import history, source

PAGE = (Path(__file__).parents[3] / "docs" / "flagscale.md").read_text(encoding="utf-8")


def test_columns_of_a_history_are_on_the_page() -> None:
    page = PAGE[: PAGE.index("## Conversion of keys")]
    names = {*history.NO_KNOBS, *source.KNOB_NAMES} - {"", *history.SPLITS}
    assert [name for name in names if f"`{name}`" not in page] == []
