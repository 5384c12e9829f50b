import pytest
from flagcore_iluvatar import hooks
from flagcore_testing import PluginConformance


class TestIluvatar(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
