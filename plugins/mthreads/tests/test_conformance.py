import pytest
from flagcore_mthreads import hooks
from flagcore_testing import PluginConformance


class TestMthreads(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
