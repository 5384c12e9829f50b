"""A plan ends with a command for its recommended candidate, and says what it lacks."""

import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Flag, Project


def test_a_plan_ends_with_a_command_that_writes_its_script(flag: Flag, project: Project) -> None:
    spec = project.spec()
    last = flag("estimate", spec, "--top", "1").worked().err.splitlines()[-1]
    words = shlex.split(last.partition("flag export")[2])
    files = [Path(each).name for each in flag("export", *words).worked().out.splitlines()]
    assert "job.json" in files
    several = flag("export", *words, "-o", "-")
    assert (several.code, several.out) == (2, "")
    assert "--to toy" in several.err


def test_a_plan_without_a_chip_asks_for_one(flag: Flag, project: Project) -> None:
    spec = project.spec(cluster={"chip": "auto"})
    refused = flag("estimate", spec)
    assert refused.code == 2
    assert "--chip" in refused.err
    flag("estimate", spec, "--chip", "cpu", "--top", "1").worked()


@pytest.mark.parametrize("target", ["toyy", "compose"])
def test_a_refused_target_lists_those_that_accept_the_job(flag: Flag, project: Project, target: str) -> None:
    refused = flag("export", project.spec(), "--to", target)
    assert refused.code == 2
    known = refused.err.strip().rpartition(": ")[2].split(", ")
    assert "toy" in known
    for each in known:
        flag("export", project.spec(), "--to", each).worked()
