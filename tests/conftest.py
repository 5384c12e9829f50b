"""What all tests share: nothing that this user has calibrated decides them."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep calibrations in a folder of the tests' own, in this process and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAGCORE_HOME", str(tmp_path_factory.mktemp("home")))
        yield
