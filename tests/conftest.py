"""What all tests share: nothing that this user has calibrated decides them, and how they are spread over processes."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

EXPENSIVE = ("runs", "workshop")
"""Fixtures of a session that tune for real: all tests that share one stay in one process of pytest-xdist."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for pytest-xdist: by an expensive fixture or by file. Those of real processes go anywhere.

    A test that marks a group of its own stays in it.
    """
    for item in items:
        if not any(item.iter_markers("xdist_group")):
            shared = [name for name in EXPENSIVE if name in getattr(item, "fixturenames", ())]
            if shared or not any(item.iter_markers("process")):
                item.add_marker(pytest.mark.xdist_group(shared[0] if shared else item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """Keep what collecting made out of later garbage collections: the load client asks for a full one a measurement."""
    gc.collect()
    gc.freeze()


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
