"""The page of vendors is what their plugins ship today."""

from pathlib import Path

from benchmarks.vendors_page import VENDORS, chips, page
from flagcore.domain.maturity import Claim, Maturity
from flagcore.vendorkit.variables import read_variables

PAGE = Path(__file__).parent.parent / "docs" / "vendors.md"


def test_the_page_of_vendors_is_current() -> None:
    assert PAGE.read_text() == page(), "run `python benchmarks/vendors_page.py > docs/vendors.md`"


def test_the_page_has_each_chip_and_each_variable() -> None:
    text = PAGE.read_text()
    for vendor in VENDORS:
        assert all(f"| {chip.name} |" in text for chip in chips(f"flagcore_{vendor}"))
        assert all(f"`{each.name}`" in text for each in read_variables(f"flagcore_{vendor}"))


def test_one_word_tells_the_best_that_a_plugin_stands_on() -> None:
    claim = (Claim(what="facts", chips=("A1",)),)
    assert Maturity(from_documents=claim).word == "documents"
    assert Maturity(from_documents=claim, checked_on_transcripts=claim).word == "transcripts"
    assert Maturity(from_documents=claim, run_on_hardware=claim).word == "hardware"
