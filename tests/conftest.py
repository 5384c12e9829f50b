"""What all tests share: nothing that this user has calibrated decides them, and how they are spread over processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process of pytest-xdist; those of real processes, which mostly wait, go anywhere.

    A file whose tests share an expensive fixture, or follow each other, marks a group of its own.
    """
    for item in items:
        if not any(item.iter_markers("xdist_group")) and not any(item.iter_markers("process")):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture(autouse=True, scope="session")
def _no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep calibrations in a folder of the tests' own, in this process and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAGCORE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, _no_calibration: None) -> Path:
    """A folder as readers of the pages have it, with a finished run; made once, so that tests only read it."""
    from tests.workshop import build

    return build(tmp_path_factory.mktemp("workshop"))
