"""The machine of all tests: two idle cores of an AMD EPYC 9004, 24 GiB of memory of which 20 are available, in UTC.

`conftest.py` imports this module, and puts its folder on PYTHONPATH, so that Python processes which tests start import
it by `sitecustomize`. It replaces what programs read of the machine, not what the machine does. Tests of detection give
the function that they test a root folder, or replace what it reads themselves. Imports are few: each process pays them.
"""

import os
import sys
import time
import zlib
from _thread import _local

CORES = 2
GIB = 2**30
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "root")
OWN = {HERE, os.path.dirname(os.path.dirname(HERE))}
"""The folders on PYTHONPATH of processes that have only what is installed."""
UNREAD = ("FLAGCORE_", "PYTEST_", "TEST_", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_", "LINES", "COLUMNS", "KMP_")
UNREAD += ("MASTER_", "NNODES", "NODE_RANK", "RANK", "WORLD_SIZE", "LOCAL_")
"""How the names of variables begin that differ from test to test, and do not change what torch says of its devices."""
PINS = int(os.environ.setdefault("TEST_MACHINE_CORES", str(len(os.sched_getaffinity(0))))) >= CORES
"""Whether processes can be pinned to the cores that they see. The first process decides it: others may be pinned."""
_pinned = _local()


def _fix_cores():
    """Let a process see CORES of its cores. On a machine with fewer, pins to cores have no effect."""
    usable = os.sched_getaffinity
    if PINS:
        os.sched_getaffinity = lambda pid: set(sorted(usable(pid))[:CORES])
    else:
        os.sched_getaffinity = lambda pid: set(getattr(_pinned, "cores", range(CORES)))
        os.sched_setaffinity = lambda pid, cores: setattr(_pinned, "cores", cores)


def _fix_psutil(module):
    memory, times = module.virtual_memory, module.cpu_times
    fixed = {"total": 24 * GIB, "available": 20 * GIB, "used": 3 * GIB, "free": 18 * GIB, "percent": 16.7}
    module.virtual_memory = lambda: memory()._replace(**fixed)
    nothing = times()._replace(**dict.fromkeys(times()._fields, 0.0))

    def idle(percpu=False):
        seconds = time.monotonic()
        if percpu:
            return [nothing._replace(idle=seconds)] * CORES
        return nothing._replace(idle=CORES * seconds)

    module.cpu_times = idle


def _read_below_root(*functions):
    from pathlib import Path

    for function in functions:
        function.__defaults__ = (Path(ROOT),)


def _measure_nothing(module):
    """Use the table by instruction set; tests of the measurement call `rates_here.__wrapped__`."""
    measured = module.rates_here
    module.rates_here = lambda *arguments, **named: None
    module.rates_here.__wrapped__ = measured


def _ask_torch_once(module):
    """Ask the installed torch, whose import takes seconds, each question once for all processes of the tests."""
    ask = module.tool_output

    def answer(*argv, environment=None, **how):
        variables, folder = dict(os.environ if environment is None else environment), os.environ.get("TEST_ANSWERS")
        paths = variables.get("PYTHONPATH", "").split(os.pathsep)
        if module._QUERY_TORCH not in argv or not folder or not OWN.issuperset(paths) or os.path.exists("torch.py"):
            return ask(*argv, environment=environment, **how)
        kept = sorted(each for each in variables.items() if not each[0].startswith(UNREAD))
        file = os.path.join(folder, f"{zlib.crc32(repr((argv, kept)).encode()):x}")
        if not os.path.exists(file):
            printed = ask(*argv, environment=environment, **how)
            if printed is None:
                return None
            with open(f"{file}-{os.getpid()}", "w", encoding="utf-8") as new:
                new.write(printed)
            os.replace(new.name, file)
        with open(file, encoding="utf-8") as known:
            return known.read()

    module.tool_output = answer


AFTER_IMPORT = {
    "psutil": _fix_psutil,
    "flagcore.domain.host": lambda module: _read_below_root(module.quota_cores, module.allowed_memory_bytes),
    "flagcore_cpu.rates": _measure_nothing,
    "flagcore_vendorkit.machine": _ask_torch_once,
    "flagcore_cpu.machine": lambda module: _read_below_root(module.Processor.read.__func__),
}
"""What is replaced in a module as soon as it has been imported."""


class _Loader:
    """A loader that calls what is in AFTER_IMPORT. Loaders are wrapped, because pytest has one for several modules."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        self._loader.exec_module(module)
        AFTER_IMPORT[module.__name__](module)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in AFTER_IMPORT:
            return None
        finders = [finder for finder in sys.meta_path if finder is not _Finder]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_fix_cores()
os.getloadavg = lambda: (0.25, 0.25, 0.25)
os.environ["TZ"] = "UTC"
time.tzset()
for _name in AFTER_IMPORT.keys() & sys.modules.keys():
    AFTER_IMPORT[_name](sys.modules[_name])
sys.meta_path.insert(0, _Finder)
