import pytest
from flagcore_kunlunxin import hooks
from flagcore_testing import PluginConformance


class TestKunlunxin(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
