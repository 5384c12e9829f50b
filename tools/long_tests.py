"""Prints the files with long tests for the changed files, for `.ci/run`.

Changes are relative to the merge base with `main`, or, on `main`, to the previous commit; the variable BASE names
another commit. The tests of a source `flagcore/a/b.py` are in the nearest folder of `tests/a/`, those of another
distribution in its folder `tests`; FURTHER lists the others.
"""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "mark.long"
FURTHER = {
    "flagcore/tuner/loop.py": ("tests/cli", "tests/product/cli"),
    "flagcore/launchers": ("tests/cli", "tests/product/cli", "engines", "extras"),
    "flagcore/contracts": ("tests/cli", "tests/product/cli", "engines", "extras/flagscale"),
    "flagcore/tuner/stages": ("tests/cli", "tests/product/cli"),
    "flagcore/tuner/strategies": ("tests/cli", "tests/product/test_benchmarks.py"),
    "flagcore/api": ("tests/cli", "tests/product/cli"),
    "flagcore/plugins": ("tests/cli", "tests/product/cli"),
    "flagcore/tuner/store.py": ("tests/cli", "tests/tuner/test_store.py"),
    "flagcore/hooks.py": ("extras/testing", "plugins"),
    "flagcore/physics": ("tests/product/vendors",),
    "engines/megatron/flagcore_megatron": ("tests/product/vendors", "tests/product/cli/test_probe.py"),
    "engines/training/flagcore_training": (
        "engines/megatron/tests",
        "tests/product/vendors",
        "tests/product/cli/test_probe.py",
    ),
    "flagcore/tuner/shorten.py": ("engines/megatron/tests",),
    "extras/hosts/flagcore_hosts": ("extras/kubernetes", "extras/ray"),
    "extras/testing": ("plugins",),
    "extras/vendorkit": ("extras/testing", "tests/product/vendors", "plugins"),
    "plugins": ("tests/product/vendors",),
    "benchmarks": ("tests/product/test_benchmarks.py",),
    "docs": ("tests/product",),
    "README.md": ("tests/product",),
    "examples": ("tests/product", "tests/product/vendors"),
    "hatch_build.py": ("tests/product/test_packaging.py",),
    "pyproject.toml": ("tests/product/test_packaging.py",),
}
"""Prefix of a changed path, and further places of its tests. Tests of pages are at the top of `tests/product`."""


def main() -> None:
    """Print the files, separated by blanks."""
    places = {place for path in changed(base()) for place in guards(path)}
    print(*sorted(file for file in long_files() if any(lies_in(file, place) for place in places)))


def base() -> str:
    """Return the commit to compare with; empty if there is none, as in a shallow clone."""
    head = _git("rev-parse", "HEAD")
    for name in filter(None, (os.environ.get("BASE"), "origin/main", "main")):
        found = _git("merge-base", "HEAD", name)
        if found and found != head:
            return found
    return _git("rev-parse", "--verify", "--quiet", "HEAD~1")


def changed(commit: str) -> list[str]:
    """Return the paths that differ from a commit; all paths if it is empty."""
    return _git("diff", "--name-only", commit, "HEAD").splitlines() if commit else _git("ls-files").splitlines()


def guards(path: str) -> set[str]:
    """Return the files and folders of the tests for a source, a page or a test."""
    places = {place for prefix, further in FURTHER.items() if lies_in(path, prefix) for place in further}
    if path.startswith("tests/") or Path(path).name.startswith("test_"):
        places.add(path if Path(path).name.startswith("test_") else str(Path(path).parent))
    elif path.startswith(("engines/", "plugins/", "extras/")):
        places.add("/".join([*Path(path).parts[:2], "tests"]))
    elif path.startswith("flagcore/"):
        folder = Path("tests", *Path(path).parts[1:-1])
        while not (ROOT / folder).is_dir():
            folder = folder.parent
        if folder != Path("tests"):
            places.add(str(folder))
    return places


def lies_in(path: str, place: str) -> bool:
    """Return whether a path is a place or inside it; the top of `tests/product` means files only."""
    if place == "tests/product":
        return Path(path).parent == Path(place)
    return path == place or path.startswith(f"{place}/")


def long_files() -> Iterable[str]:
    """Yield the files with long tests."""
    for file in _git("ls-files", "tests", "engines", "plugins", "extras").splitlines():
        if Path(file).name.startswith("test_") and MARK in (ROOT / file).read_text(encoding="utf-8"):
            yield file


def _git(*arguments: str) -> str:
    """Return the output of git; empty if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
