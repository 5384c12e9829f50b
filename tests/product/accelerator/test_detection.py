"""The devices of a vendor that no plugin of this repository knows, as its tool lists them."""

import json
import re

import pytest

from tests.product.accelerator.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.together("training")]


def test_a_variable_selects_the_devices_and_their_order(simulated: Machine) -> None:
    listed = simulated.flag("devices", "--json", "--no-plugin", "cpu", SIMU_VISIBLE_DEVICES="3,1").stdout
    assert [(each["index"], each["chip"], each["plugin"]) for each in json.loads(listed)] == [
        (3, "S1", "simu"),
        (1, "S1", "simu"),
    ]


@pytest.mark.long
def test_the_plugin_passes_the_kit(simulated: Machine) -> None:
    report = simulated.flag("plugins", "check", "flagcore-simu").stdout
    assert re.match(r"simu 0\.1\.0: \d{2,} passed, 0 failed", report)
