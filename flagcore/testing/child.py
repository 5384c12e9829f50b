"""Checks one plugin in a separate process: `python -m flagcore.testing.child REPORT NAME [FOLDER]`.

REPORT receives one line of JSON per step: `{"begins": CHECK}`, then the result of the check; the last line is `{"ends":
NAME}`. Therefore a crash of a native library is reported as a failure of the last check that began.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from flagcore.plugins import GROUP
from flagcore.plugins.installed import installed, load_only, one_line
from flagcore.testing.checks import CHECKS
from flagcore.testing.kit import Result, Subject, run_all
from flagcore.testing.package import read_source

LOADS, SLOW = "plugin_loads", "hooks_return_quickly"
FIRST = (LOADS, SLOW)
"""Checks that run first: without them the others need not run, or would take minutes."""


def main(arguments: list[str]) -> int:
    """Check the plugin in the arguments, and return 0."""
    report, name, *folder = arguments
    logging.lastResort, logging.root.manager.emittedNoHandlerWarning = None, True  # what is tried here goes wrong
    with open(report, "w", encoding="utf-8", buffering=1) as file:
        for record in _records(name, Path(folder[0]) if folder else None):
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"ends": name}) + "\n")
    return 0


def _records(name: str, folder: Path | None) -> Iterator[dict[str, str]]:
    yield {"begins": LOADS}
    try:
        subject = _subject(name, folder)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        fix = "correct pyproject.toml or the import; `python -c` with the entry point's module shows the traceback"
        yield asdict(Result(check=LOADS, state="failed", message=f"{name}: {one_line(error)}", fix=fix))
        for check in CHECKS[1:]:
            yield asdict(Result(check=check.__name__, state="skipped", message="the plugin does not load"))
        return
    checks = sorted(CHECKS, key=lambda check: check.__name__ not in FIRST)
    for place, check in enumerate(checks):
        yield {"begins": check.__name__}
        (result,) = run_all([check], subject)
        yield asdict(result)
        if check.__name__ == SLOW and result.state == "failed":
            for left in checks[place + 1 :]:
                yield asdict(Result(check=left.__name__, state="skipped", message="a hook takes too long"))
            return


def _subject(name: str, folder: Path | None) -> Subject:
    """Import the plugin. Raises the error of the import."""
    if folder is None:
        points = installed(GROUP).points[name]
        return Subject(name=name, hooks=load_only(points), distribution=points[0].dist)
    package = read_source(folder)
    sys.path[:0] = [str(folder), str(folder / "src")]
    module, _, attribute = package.points[name].partition(":")
    hooks = importlib.import_module(module)
    return Subject(name=name, hooks=getattr(hooks, attribute) if attribute else hooks)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # threads that the plugin started may not keep it alive
