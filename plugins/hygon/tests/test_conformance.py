import pytest
from flagcore_hygon import hooks
from flagcore_testing import PluginConformance


class TestHygon(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
