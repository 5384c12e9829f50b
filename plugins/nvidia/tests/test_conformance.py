import pytest
from flagcore_nvidia import hooks
from flagcore_testing import PluginConformance


class TestNvidia(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
