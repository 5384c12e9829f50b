"""Outages of hosts that end by themselves, and one that does not, without a spare."""

import time
from collections.abc import Callable

import pytest

from tests.books import books_balance, check_kept_once
from tests.cli.conftest import BEST
from tests.hosts.bed import Bed
from tests.hosts.conftest import Project, Tune
from tests.hosts.test_faults import all_clean

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
OUTAGES: dict[str, tuple[Callable[[Bed], object], Callable[[Bed], object], float]] = {
    "cut link": (lambda bed: bed.cut("h2"), lambda bed: bed.restore("h2"), 40.0),
    "full disk": (lambda bed: bed.fill("h2"), lambda bed: bed.unfill("h2"), 15.0),
    "power off": (lambda bed: bed.poweroff("h2"), lambda bed: bed.boot("h2"), 20.0),
}


def write_spec(project: Project, **cluster: object) -> None:
    """Write a spec for two hosts without a spare."""
    (project.folder / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
    project.write_spec(sleeps=0.5, trials=5, spares=0, **cluster)


@pytest.mark.parametrize("kind", OUTAGES)
def test_a_search_continues_after_an_outage(kind: str, project: Project) -> None:
    begin, end, seconds = OUTAGES[kind]
    write_spec(project)
    tune = Tune(project)
    tune.wait_for_a_trial(1)
    begin(project.bed)
    time.sleep(seconds)
    end(project.bed)
    result = tune.finish()
    assert tune.resumed == 0, tune.output()
    assert all_clean(project.bed, everything=True) == []
    assert result["best"]["candidate"].items() >= BEST.items()
    assert books_balance(result)
    check_kept_once(project.run_dir, result)


def test_a_search_without_its_host_ends_with_an_error_and_is_resumed(project: Project) -> None:
    write_spec(project, wait_for_hosts=10)
    tune = Tune(project)
    tune.wait_for_a_trial(1)
    project.bed.cut("h2")
    assert tune.process.wait() == 6, tune.output()
    assert "host h2: " in (output := tune.output())
    assert "resume with `flag tune" in output
    measured = project.result()["counts"]["measured"]
    assert measured >= 1
    assert all_clean(project.bed) == []
    project.bed.restore("h2")
    tune.resume()
    result = tune.finish()
    assert result["counts"]["measured"] == 5 > measured
    assert all_clean(project.bed, everything=True) == []
    assert books_balance(result)
    check_kept_once(project.run_dir, result)
