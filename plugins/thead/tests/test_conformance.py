import pytest
from flagcore_testing import PluginConformance
from flagcore_thead import hooks


class TestThead(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
