import pytest
from flagcore_enflame import hooks
from flagcore_testing import PluginConformance


class TestEnflame(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
