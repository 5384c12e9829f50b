"""What went wrong beside a command's own work: a warning in the log `flagcore`, on stderr unless told otherwise."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from flagcore.plugins import LoadedPlugins, load_plugins

LOG = logging.getLogger("flagcore")


@contextmanager
def loaded_plugins(without: Collection[str]) -> Iterator[LoadedPlugins]:
    """Load the plugins, and tell at the end of each that failed or could not answer."""
    loaded = load_plugins(without)
    try:
        yield loaded
    finally:
        tell(loaded.failures)


def tell(problems: Iterable[object]) -> None:
    """Warn of each problem."""
    for problem in problems:
        LOG.warning("%s", problem)
