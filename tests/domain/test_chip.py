"""Which chips a word may have meant."""

import pytest

from flagcore.domain.chip import Chip, similar_chips, unknown_chip_hint

NAMES = {"X100-SXM": ("ACME X100 80GB HBM3",), "X100-PCIe": (), "X200": (), "BI-V150": ("天垓150",)}
CHIPS = [Chip(name=name, vendor="acme", aliases=aliases) for name, aliases in NAMES.items()]


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("X100", ("X100-SXM", "X100-PCIe")),
        ("x100 sxm", ("X100-SXM",)),
        ("acme x100", ("X100-SXM", "X100-PCIe")),
        ("ACME X100 NVL", ("X100-PCIe", "X100-SXM")),
        ("acme", ()),
        ("X100-SXM-80GB", ("X100-SXM",)),
        ("X20", ("X200",)),
        ("X1000", ("X100-PCIe", "X100-SXM")),
        ("BIV510", ("BI-V150",)),
        ("天垓", ("BI-V150",)),
        ("", ()),
        ("x", ()),
        ("unobtainium", ()),
    ],
)
def test_chips_near_a_word_come_likeliest_first(word: str, names: tuple[str, ...]) -> None:
    assert similar_chips(word, CHIPS) == names


def test_a_word_without_a_near_match_gets_all_words() -> None:
    assert unknown_chip_hint("unobtainium", CHIPS).startswith("known chips: BI-V150, X100-PCIe, X100-SXM, X200; ")
    assert unknown_chip_hint("X100", CHIPS).startswith("did you mean X100-SXM or X100-PCIe? ")
