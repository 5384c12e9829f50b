import pytest
from flagcore_cambricon import hooks
from flagcore_testing import PluginConformance


class TestCambricon(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin
