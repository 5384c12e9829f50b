import pytest
from flagcore_ascend import hooks
from flagcore_testing import PluginConformance


class TestAscend(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
