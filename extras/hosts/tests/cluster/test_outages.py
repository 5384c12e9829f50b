"""An outage without a spare that takes longer than flagcore waits."""

import pytest

from extras.hosts.tests.cluster.conftest import Project, Tune
from extras.hosts.tests.cluster.test_faults import all_clean
from tests.run_checks import books_balance, check_kept_once

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def write_spec(project: Project, **cluster: object) -> None:
    """Write a spec for two hosts without a spare."""
    (project.folder / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
    project.write_spec(sleeps=0.5, trials=5, spares=0, **cluster)


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
