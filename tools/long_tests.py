"""Prints the files of long tests that guard what changed, for `.ci/run`.

What changed is what differs from the merge base with `main`, or, on `main`, from the commit before; the variable
BASE names another commit. A source `flagcore/a/b.py` is guarded by the nearest folder of `tests/a/`; FURTHER adds what
this rule does not find.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "mark.long"
FURTHER = {
    "flagcore/loop.py": ("tests/cli",),
    "flagcore/launchers": ("tests/cli", "tests/engines"),
    "flagcore/contracts": ("tests/cli", "tests/engines"),
    "flagcore/stages": ("tests/cli",),
    "flagcore/strategies": ("tests/cli", "tests/benchmarks"),
    "flagcore/api": ("tests/cli",),
    "flagcore/plugins": ("tests/cli",),
    "flagcore/store": ("tests/cli", "tests/test_store.py"),
    "flagcore/hooks.py": ("tests/testing", "plugins"),
    "flagcore/vendorkit": ("tests/testing", "tests/vendors", "plugins"),
    "flagcore/physics": ("tests/vendors",),
    "flagcore/engines/megatron": ("tests/vendors", "tests/cli/test_probe.py"),
    "flagcore/stages/shorten.py": ("tests/engines/megatron",),
    "flagcore/testing": ("plugins",),
    "plugins": ("tests/vendors",),
    "benchmarks": ("tests/test_benchmarks.py", "tests/benchmarks"),
    "docs": ("tests",),
    "docs/portability.md": ("tests/vendors",),
    "README.md": ("tests",),
    "examples": ("tests", "tests/vendors"),
    "hatch_build.py": ("tests/test_packaging.py",),
    "pyproject.toml": ("tests/test_packaging.py",),
}
"""Prefix of a changed path: where its tests are, too. A page is shown and run by the tests at the top of `tests`."""


def main() -> None:
    """Print the files, blanks between them."""
    places = {place for path in changed(base()) for place in guards(path)}
    print(*sorted(file for file in long_files() if any(lies_in(file, place) for place in places)))


def base() -> str:
    """Return the commit that the changes are counted from: empty where there is none, as in a shallow clone."""
    head = _git("rev-parse", "HEAD")
    for name in filter(None, (os.environ.get("BASE"), "origin/main", "main")):
        found = _git("merge-base", "HEAD", name)
        if found and found != head:
            return found
    return _git("rev-parse", "--verify", "--quiet", "HEAD~1")


def changed(commit: str) -> list[str]:
    """Return the paths that differ from a commit; all that there are if it is empty."""
    return _git("diff", "--name-only", commit, "HEAD").splitlines() if commit else _git("ls-files").splitlines()


def guards(path: str) -> set[str]:
    """Return the files and folders of tests that guard a source, a page or a test."""
    places = {place for prefix, further in FURTHER.items() if lies_in(path, prefix) for place in further}
    if path.startswith(("tests/", "plugins/")):
        places.add(path if Path(path).name.startswith("test_") else str(Path(path).parent))
    elif path.startswith("flagcore/"):
        folder = Path("tests", *Path(path).parts[1:-1])
        while not (ROOT / folder).is_dir():
            folder = folder.parent
        if folder != Path("tests"):
            places.add(str(folder))
    return places


def lies_in(path: str, place: str) -> bool:
    """Return whether a path is a place or lies in it; at the top of `tests` are only the files there."""
    if place == "tests":
        return Path(path).parent == Path(place)
    return path == place or path.startswith(f"{place}/")


def long_files() -> Iterable[str]:
    """Yield the files that have long tests."""
    for file in _git("ls-files", "tests", "plugins").splitlines():
        if Path(file).name.startswith("test_") and MARK in (ROOT / file).read_text(encoding="utf-8"):
            yield file


def _git(*arguments: str) -> str:
    """Return what git prints; nothing where it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
