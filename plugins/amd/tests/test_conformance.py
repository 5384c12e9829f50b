import pytest
from flagcore_amd import hooks
from flagcore_testing import PluginConformance


class TestAmd(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
