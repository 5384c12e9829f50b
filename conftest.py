"""What all tests share: one machine (`tests/machine`), no calibrations of this user, and how they are spread over
processes."""

import gc
import importlib
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.costs", "tests.forks"]
ROOT = Path(__file__).parent
MACHINE = str(ROOT / "tests" / "machine")
if MACHINE not in sys.path:  # in processes that tests start, it is on PYTHONPATH
    sys.path.insert(0, MACHINE)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [MACHINE, str(ROOT), os.environ.get("PYTHONPATH")]))
importlib.import_module("fixed_machine")
os.environ["FLAGCORE_LANG"] = "en"  # whatever the locale is
os.environ["FLAGCORE_CACHE"] = "off"  # tests replace functions
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets programs in the background ignore it
gc.set_threshold(10_000, 20)  # tests leave few cycles: by default, a thirtieth of their time goes into looking for them

SHARED = ("runs", "example_folder")
"""Fixtures of the session with a finished run. Their tests are slow, and stay in one process."""
SLOW_CHECKS = tuple(f"test_conformance[{each}" for each in ("broken_tool", "failure_patterns_are", "hooks_", "import_"))
"""Names of the kit's checks that start processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shuffle`."""
    parser.addoption("--shuffle", metavar="SEED", help="run the files, and the tests of each, in this random order")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests, and put first what takes long, or shuffle.

    Slow are tests of SHARED and SLOW_CHECKS, and costly ones. A long file at the end keeps one process busy alone.
    """
    slow = Counter[Path]()
    for item in items:
        for fixture in {*SHARED} & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")
            item.add_marker(pytest.mark.together(fixture))
        if item.name.startswith(SLOW_CHECKS) or item.get_closest_marker("costly"):
            item.add_marker("slow")
        if item.name.startswith("test_conformance["):
            item.add_marker("costly")
        if item.get_closest_marker("slow") or item.get_closest_marker("long"):
            slow[item.path] += 1

    def order(item: pytest.Item) -> tuple[bool, bool, int]:
        alone = item.get_closest_marker("together") is None
        return alone, item.get_closest_marker("spread") is None, -slow[item.path]

    if seed := config.getoption("shuffle"):
        random.Random(seed).shuffle(items)
        places = {item.path: place for place, item in enumerate(items)}
        items.sort(key=lambda item: places[item.path])
    else:
        items.sort(key=order)


@pytest.fixture(autouse=True, scope="module")
def _freeze() -> None:
    """Keep what is there out of later garbage collections: the load client asks for a full one a measurement."""
    gc.collect()
    gc.freeze()


def _read_once(read_job: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that converts each published run once: every plan is compared with them."""
    known: dict[str, Any] = {}

    def read(line: Any, engines: Any) -> Any:
        if "https://" not in str(line.get("source")):
            return read_job(line, engines)
        key = f"{line} {[*engines]}"
        if key not in known:
            known[key] = read_job(line, engines)
        return known[key]

    return read


@pytest.fixture(autouse=True, scope="session")
def _no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep calibrations, and the files of torch, in folders of the tests' own, also in processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAGCORE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("TEST_ANSWERS", str(tmp_path_factory.mktemp("answers")))  # of torch: `tests/machine`
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("torch")))
        patch.setattr("flagcore.cli.options.SILENT_S", 3600.0)  # a slow machine prints nothing more
        patch.setattr("flagcore.loading.limits._OWN_PROCESS", os.getpid())  # a fork of the tests is no trial
        patch.setattr("flagcore.spec.jobs.read_job", _read_once(importlib.import_module("flagcore.spec.jobs").read_job))
        yield


@pytest.fixture(scope="session")
def example_folder(tmp_path_factory: pytest.TempPathFactory, _no_calibration: None) -> Path:
    """A folder as readers of the pages have it, with a finished run; made once, so that tests only read it."""
    from tests.product.example_folder import build

    return build(tmp_path_factory.mktemp("example_folder"))
