"""What the plugin ships as data: variables, quirks, and how mature each part is."""

from pathlib import Path

from flagcore_iluvatar import hooks

from flagcore.testing import ShippedData


class TestIluvatarData(ShippedData):
    hooks, tests, chip_name, vendor = hooks, Path(__file__).parent, "BI-V150", "iluvatar"
