import pytest
from flagcore_metax import hooks
from flagcore_testing import PluginConformance


class TestMetax(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
