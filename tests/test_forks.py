"""Tests run in forks, and with a limit of their cost: what `tests/forks.py` and `tests/costs.py` report."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from tests import costs

costs.LIMIT_S, costs.CROWDED, costs.slowness = 0.1, 1e9, lambda: 1.0
"""
TESTS = """
import os
import time

import pytest


def test_ends_its_process():
    os._exit(3)


def test_after_it():
    pass


@pytest.fixture(scope="module")
def shared():
    work()


def work():
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass


def test_of_a_dear_fixture(shared):
    pass


def test_dear():
    work()


@pytest.mark.costly
def test_marked():
    work()


@pytest.fixture(scope="module")
def turns():
    with open(__name__, "a+") as file:
        file.write("x")
        return file.tell()


@pytest.mark.slow
def test_fails_once(turns):
    assert turns == 2, f"turn {turns}"


@pytest.mark.slow
def test_fails_twice(turns):
    assert False
"""


@pytest.mark.costly
def test_a_process_that_ends_and_a_dear_test_are_failures_and_a_slow_test_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = costly\n slow\n long\n spread\n together\n")
    words = [sys.executable, "-m", "pytest", "-p", "tests.forks", "-p", "tests.costs", "--forks", "2", "--costs", "-rA"]
    ran = subprocess.run([*words, "--rootdir", "."], cwd=tmp_path, capture_output=True, text=True)
    names = {
        "PASSED": ("after_it", "of_a_dear_fixture", "marked", "fails_once"),
        "FAILED": ("ends_its_process", "dear", "fails_twice"),
        "RERUN": ("fails_once", "fails_twice"),
    }
    for word, expected in names.items():
        found = {line.split()[1] for line in ran.stdout.splitlines() if line.startswith(f"{word} ")}
        assert found == {f"test_{file}.py::test_{name}" for file in ("one", "two") for name in expected}, ran.stdout
    assert "status 3" in ran.stdout
    assert "turn 1" in ran.stdout  # why it was repeated
    assert "fixture shared" in ran.stdout
