"""What the plugin ships as data: variables, quirks, and how mature each part is."""

from pathlib import Path

from flagcore_metax import hooks

from flagcore.testing import ShippedData


class TestMetaxData(ShippedData):
    hooks, tests, chip_name, vendor = hooks, Path(__file__).parent, "C500", "metax"
