"""What all tests share: one machine (`tests/machine`), no calibrations of this user, and how they are spread over
processes."""

import gc
import importlib
import os
import random
import signal
import sys
from collections.abc import Iterator
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

TOGETHER = {
    "training": (
        "tests/accelerator/",
        "tests/cli/test_fidelity.py",
        "tests/cli/test_probe.py",
        "engines/megatron/tests/trial/test_probe.py",
        "engines/megatron/tests/trial/test_trial_parity.py",
        "engines/megatron/tests/trial/test_trial_program.py",
        "engines/megatron/tests/trial/test_tune_for_real.py",
        "engines/training/tests/test_memory_of_ranks.py",
        "tests/vendors/test_simulated_nodes.py",
    ),
    "fixture runs": ("tests/report/page/",),
    "fixture example_folder": ("tests/test_docs",),
    "megatron-core, imported": (
        "engines/megatron/tests/space/test_rules.py",
        "engines/megatron/tests/layers/test_stages.py",
        "engines/megatron/tests/trial/test_trial_layers.py",
    ),
}
"""Prefixes of files whose tests stay in one process of pytest-xdist: they train, or share what takes long to start."""
SPREAD = (
    "tests/cli/test_tune",
    "engines/serving/tests/trial/test_misbehaving_servers.py",
    "tests/launchers/",
    "extras/",
    "engines/llamacpp/",
    "engines/lmdeploy/",
    "engines/sglang/",
    "engines/trainers/",
)
"""Prefixes of files whose tests may run in any process, for most of their time is waiting."""


FIRST = (
    *TOGETHER["training"],
    *SPREAD,
    "plugins/nvidia/tests/test_conformance.py",
    "extras/hosts/tests/cluster/",
    "tests/benchmarks/test_replay.py",
    "extras/flagscale/tests/test_trees.py",
    "tests/cli/test_terminal.py",
    "tests/cli/test_plugins",
    "tests/cli/",
    "tests/vendors/",
)
"""Prefixes of files that take long and so start first: a long file at the end keeps one process busy alone."""
SLOW_CHECKS = tuple(f"test_conformance[{each}" for each in ("broken_tool", "failure_patterns_are", "hooks_", "import_"))
"""Names of the kit's checks that start processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shuffle`."""
    parser.addoption("--shuffle", metavar="SEED", help="run the files, and the tests of each, in this random order")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests with a finished run and SLOW_CHECKS as slow, repeat failed slow tests once, and put FIRST first, or
    shuffle."""
    for item in items:
        if {"runs", "example_folder"} & {*getattr(item, "fixturenames", ())} or item.name.startswith(SLOW_CHECKS):
            item.add_marker("slow")
        if item.get_closest_marker("slow") or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.flaky(reruns=1))  # real processes and clocks; `-rR` lists what was repeated

    def order(item: pytest.Item) -> int:
        return next((place for place, prefix in enumerate(FIRST) if item.nodeid.startswith(prefix)), len(FIRST))

    if seed := config.getoption("shuffle"):
        random.Random(seed).shuffle(items)
        places = {item.path: place for place, item in enumerate(items)}
        items.sort(key=lambda item: places[item.path])
    else:
        items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread tests over processes file by file, but for TOGETHER and SPREAD.

    Marks `xdist_group` would say it, but pytest-xdist 3.8 does not see them under pytest 9.2.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SPREAD) and "/cluster/" not in nodeid:  # which has a fixture of the session
                return nodeid
            groups = (name for name, files in TOGETHER.items() if nodeid.startswith(files))
            return next(groups, nodeid.partition("::")[0])

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
    from tests.example_folder import build

    return build(tmp_path_factory.mktemp("example_folder"))
