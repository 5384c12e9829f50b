"""Secrets in a spec, a command and the shell do not get where other users can read them."""

import os
import re
import shutil
from pathlib import Path

import pytest

from flagcore import api
from tests.cli.conftest import TRAIN, Flag, Project
from tests.planted import MARK, SHELL, VARIABLES, WORDS, leaking_files, leaks

LOGS = """\
import os, sys
print(sys.argv, {**os.environ}, sep="\\n")
pid = os.getppid()
while pid > 1 and pid != int(os.environ["TUNER"]):  # what `ps` shows of the processes that started this one
    print("ancestor:", open(f"/proc/{pid}/cmdline").read(), flush=True)
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
if os.environ["TRAIN_WHEN"] != "1":
    sys.exit(f"cannot log in with {os.environ['MY_PASSWORD']} at {sys.argv[3:-1]} or {os.environ['UPSTREAM']}")
"""


@pytest.mark.slow
def test_no_file_of_others_screen_or_process_list_has_a_secret(
    flag: Flag, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(LOGS + TRAIN)
    command = [*project.job(0)["train"]["command"], *WORDS]
    spec = project.spec(
        control={"max_trials": 3, "repeats": 0},
        train={"command": command},
        envs={**VARIABLES, "TUNER": str(os.getpid()), "TRAIN_WHEN": "1"},
    )
    os.umask(os.umask(0o022))
    screens = [flag("tune", spec, "--run-dir", "run").worked()]
    logged = (tmp_path / "run/trials/0/stdout.log").read_text()
    assert logged.count(MARK) > 30
    for line in logged.splitlines():
        assert not (line.startswith("ancestor:") and MARK in line), line
    best = ("run", "--candidate", "best")
    screens += [
        flag("tune", spec, "--run-dir", "failed", "--set", "envs.TRAIN_WHEN=no", "--set", "envs.TRAIN_DOES=crash"),
        *(flag(*words) for words in (["explain", spec], ["estimate", spec], ["runs", "show", "run"], ["runs", "show", "run", "--json"],
          ["runs", "list", "."], ["compare", "run"], ["report", "run"], ["doctor"], ["explain", spec, "--json"], ["tune", spec, "--run-dir", "run", "--dry-run"], ["run", "run", "--print"], ["devices"])),
        *(flag("export", "run", "--to", target) for target in api.export_targets()),
    ]
    for screen in screens: print(screen.code, screen.out[:100], screen.err[:300])
    shown = [leaks(screen.out + screen.err) for screen in screens]
    files = leaking_files(tmp_path, inputs={"spec.yaml"})
    import pprint; pprint.pprint((shown, files), width=150)
    assert not any(shown) and not files
