import pytest

from tests.product.accelerator import machine
from tests.product.accelerator.machine import Machine


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine with simulated devices and the vendor's plugin."""
    return Machine(tmp_path_factory.mktemp("simulated"))


@pytest.fixture(scope="session")
def built(simulated: Machine) -> Machine:
    """The machine with the vendor's build of torch."""
    machine.build()
    return simulated
