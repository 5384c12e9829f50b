"""Secrets of a spec, its command and the shell do not get where other users can read them."""

import os

import pytest

from flagcore.launchers import guard
from tests.cli.conftest import TRAIN, Flag, Project
from tests.planted import MARK, SHELL, VARIABLES, WORDS, leaking_files, leaks

LOGS = """\
import os, sys
print(sys.argv, {**os.environ}, sep="\\n")
pid = os.getppid()
while pid > 1 and pid != int(os.environ["TUNER"]):  # what `ps` shows of the processes that started this one
    print("ancestor:", open(f"/proc/{pid}/cmdline").read(), flush=True)
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
if os.environ["FAILS"]:
    sys.exit(f"cannot log in with {os.environ['MY_PASSWORD']} at {sys.argv[3:-1]}, or {os.environ['UPSTREAM']}")
"""
SHOWN = (["explain", "spec.yaml"], ["estimate", "spec.yaml", "--json"], ["runs", "list", "."])
"""What shows a spec or runs."""


@pytest.mark.slow
def test_no_file_of_others_no_screen_and_no_process_list_has_a_secret(
    flag: Flag, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons of failures are cut in the middle of secrets, which are then not recognized in what is left of them."""
    folder = project.folder
    for name, value in {**SHELL, "FLAGCORE_HOME": str(folder / "home")}.items():
        monkeypatch.setenv(name, value)
    (folder / "train.py").write_text(LOGS + TRAIN)
    spec = project.spec(
        control={"max_trials": 2, "repeats": 0},
        train={"command": [*project.job(0)["train"]["command"], *WORDS]},
        envs={**VARIABLES, "TUNER": str(os.getpid()), "FAILS": ""},
    )
    screens = [flag("tune", spec, "--run-dir", "run").worked()]
    logged = (folder / "run/trials/0/stdout.log").read_text()
    ancestors = [line for line in logged.splitlines() if line.startswith("ancestor:")]
    assert guard.__file__ in "".join(ancestors)
    assert not leaks("".join(ancestors))
    assert logged.count(MARK) >= len(VARIABLES) + len(SHELL) + 9  # all of them are there

    screens += [flag("tune", spec, "--run-dir", "failed", "--set", "envs.FAILS=1")]
    assert "cannot log in with (left out)" in screens[-1].err
    screens += [flag(*words).worked() for words in SHOWN]
    screens += [flag("runs", "show", run, *form) for run in ("run", "failed") for form in ([], ["--json"])]
    screens += [flag("tune", spec, "--set", f"{key}={MARK}-0123456789") for key in ("envs.my_token.b", "hf_token")]
    assert [leaks(each.out + each.err) for each in screens] == [[]] * len(screens)
    assert leaking_files(folder, inputs={"spec.yaml"}) == {}
