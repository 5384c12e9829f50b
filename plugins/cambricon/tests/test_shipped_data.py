"""What the plugin ships as data: variables, quirks, and how mature each part is."""

from pathlib import Path

from flagcore_cambricon import hooks

from flagcore.testing import ShippedData


class TestCambriconData(ShippedData):
    hooks, tests, chip_name, vendor = hooks, Path(__file__).parent, "MLU370-X8", "cambricon"
