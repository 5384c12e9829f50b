"""What all tests share: one machine (`tests/machine`), no calibrations of this user, and how they are spread over
processes."""

import gc
import importlib
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent
MACHINE = str(ROOT / "tests" / "machine")
if MACHINE not in sys.path:  # in processes that tests start, it is on PYTHONPATH
    sys.path.insert(0, MACHINE)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [MACHINE, str(ROOT), os.environ.get("PYTHONPATH")]))
importlib.import_module("fixed_machine")
os.environ["FLAGCORE_LANG"] = "en"  # whatever the locale is
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets programs in the background ignore it

SHARED = ("runs", "example_folder")
"""Fixtures of the session with a finished run. Their tests are slow, and stay in one process."""
SLOW_CHECKS = tuple(f"test_conformance[{each}" for each in ("broken_tool", "failure_patterns_are", "hooks_", "import_"))
"""Names of the kit's checks that start processes."""
SCOPES = Path(tempfile.gettempdir()) / f"flagcore-scopes-{os.getpid()}.json"
"""Here the first process of pytest-xdist writes what stays in one process, by the name of the test, because marks stay
in the processes that collect. The scheduler reads it once."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shuffle`."""
    parser.addoption("--shuffle", metavar="SEED", help="run the files, and the tests of each, in this random order")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests of SHARED and SLOW_CHECKS, repeat failed slow tests once, and put first what takes long, or shuffle.

    A long file at the end keeps one process busy alone.
    """
    slow = Counter[Path]()
    for item in items:
        for fixture in {*SHARED} & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")
            item.add_marker(pytest.mark.together(fixture))
        if item.name.startswith(SLOW_CHECKS):
            item.add_marker("slow")
        if item.get_closest_marker("slow") or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.flaky(reruns=1))  # real processes and clocks; `-rR` lists what was repeated
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


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Name the scheduler's file to a process of pytest-xdist."""
    node.workerinput["scopes"] = str(SCOPES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write what the marks `together` and `spread` say."""
    worker = getattr(session.config, "workerinput", {})
    if worker.get("workerid") == "gw0":
        scopes = {item.nodeid: item.nodeid for item in session.items if item.get_closest_marker("spread")}
        for item in session.items:
            if mark := item.get_closest_marker("together"):
                scopes[item.nodeid] = mark.args[0]
        Path(worker["scopes"]).write_text(json.dumps(scopes), encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread tests over processes file by file, but for those with the mark `together` or `spread`."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):  # type: ignore[misc]
        scopes: Mapping[str, str] = {}

        def schedule(self) -> None:
            if SCOPES.exists():
                self.scopes = json.loads(SCOPES.read_text(encoding="utf-8"))
                SCOPES.unlink()
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self.scopes.get(nodeid) or nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Scheduler(config, log)


@pytest.fixture(autouse=True, scope="module")
def _freeze() -> None:
    """Keep what is there out of later garbage collections: the load client asks for a full one a measurement."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep calibrations, and the files of torch, in folders of the tests' own, also in processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAGCORE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("torch")))
        patch.setattr("flagcore.cli.options.SILENT_S", 3600.0)  # a slow machine prints nothing more
        yield


@pytest.fixture(scope="session")
def example_folder(tmp_path_factory: pytest.TempPathFactory, _no_calibration: None) -> Path:
    """A folder as readers of the pages have it, with a finished run; made once, so that tests only read it."""
    from tests.product.example_folder import build

    return build(tmp_path_factory.mktemp("example_folder"))
