from flagcore_amd.hooks import plugin


def test_cards_of_two_dies_are_two_devices() -> None:
    dies = {chip.name: chip.devices_per_card for chip in plugin.flagcore_chips()}
    assert {name for name, count in dies.items() if count == 2} == {"MI250", "MI250X"}
