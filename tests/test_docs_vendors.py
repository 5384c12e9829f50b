"""The pages of vendors match the data files of their plugins."""

import pytest

from docs.site.vendor_pages import VENDORS, chips, pages
from flagcore.domain.maturity import Claim, Maturity
from flagcore.vendorkit.variables import read_variables

PAGES = {file.stem: (file, text) for file, text in pages().items()}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str) -> None:
    file, text = PAGES[name]
    assert file.read_text(encoding="utf-8") == text, "run `python docs/site/vendor_pages.py`"


@pytest.mark.parametrize("vendor", VENDORS)
def test_page_has_every_chip_and_every_variable(vendor: str) -> None:
    text = PAGES[vendor][1]
    assert all(f"| {chip.name} |" in text for chip in chips(f"flagcore_{vendor}"))
    assert all(f"`{each.name}`" in text for each in read_variables(f"flagcore_{vendor}"))


def test_maturity_is_the_best_level_of_a_plugin() -> None:
    claim = (Claim(what="facts", chips=("A1",)),)
    assert Maturity(from_documents=claim).word == "documents"
    assert Maturity(from_documents=claim, checked_on_transcripts=claim).word == "transcripts"
    assert Maturity(from_documents=claim, run_on_hardware=claim).word == "hardware"
