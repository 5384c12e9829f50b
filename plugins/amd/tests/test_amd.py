import pytest
from flagcore_amd.hooks import plugin


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        *(("AMD Instinct MI300X OAM", "MI300X"), ("AMD Instinct MI308X", "MI308X"), ("MI355X", "MI355X")),
        *(("AMD Instinct MI250X", "MI250X"), ("AMD Instinct MI250X/MI250", "MI250")),
    ],
)
def test_names_of_tool_and_torch_are_the_same_chip(reported: str, name: str) -> None:
    assert [chip.name for chip in plugin.flagcore_chips() if chip.has_name(reported)] == [name]


@pytest.mark.parametrize(("name", "refused"), [("MI250X", {"fp8"}), ("MI300X", {"mxfp8"}), ("MI355X", set())])
def test_formats_without_units_are_refused(name: str, refused: set[str]) -> None:
    (chip,) = (chip for chip in plugin.flagcore_chips() if chip.name == name)
    support = plugin.flagcore_engine_support(chip, "vllm", None, "serve")
    assert support is not None
    values = {str(value) for each in support.refused for value in each.values}
    assert refused <= values
    assert ("fp8" in values) == (name == "MI250X")


def test_cards_of_two_dies_are_two_devices() -> None:
    dies = {chip.name: chip.devices_per_card for chip in plugin.flagcore_chips()}
    assert {name for name, count in dies.items() if count == 2} == {"MI250", "MI250X"}
