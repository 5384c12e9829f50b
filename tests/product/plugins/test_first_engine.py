"""Which of several engines is asked first."""

from flagcore.api.commands import calibrate as calibration
from flagcore.plugins import ENGINES, load_plugins, names
from tests.plugins.conftest import Install


def test_devices_are_measured_for_an_engine_of_flagcore_first(install: Install) -> None:
    *_, before = calibration.target(load_plugins())
    source = "import copy\nfrom flagcore_megatron import ENGINE\nENGINE = copy.copy(ENGINE)\n"
    install("flagcore-acme", {"acme": "flagcore_acme:ENGINE"}, {"flagcore_acme": source}, group=ENGINES)
    assert names(ENGINES)[0] == "acme"
    *_, engine = calibration.target(load_plugins())
    assert engine == before
