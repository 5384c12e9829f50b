"""Makes Python programs see as many cores as MANY_CORES says; pins to cores that the machine lacks have no effect."""

import os

_count, _usable, _pin = int(os.environ["MANY_CORES"]), os.sched_getaffinity, os.sched_setaffinity
_real = _usable(0)


def _see(pid):
    cores = _usable(pid)
    return {*range(_count)} if cores == _real else cores


os.cpu_count = os.process_cpu_count = lambda: _count
os.sched_getaffinity = _see
os.sched_setaffinity = lambda pid, cores: _pin(pid, {*cores} & _real or _real)
