"""A run's page, result and best.sh hold no secret, and the best starts with it all the same."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flagcore import api
from tests.product.cli.conftest import TRAIN, Project

SHELL_SECRET, SPEC_SECRET, COMMAND_SECRET = "hf-of-my-shell-1", "wandb-of-the-spec-2", "typed-in-the-command-3"
LOGS = 'import os, sys\nprint({**os.environ})\nprint(sys.argv)\nprint("logged in with", sys.argv[3])\n'


@pytest.mark.slow
def test_secrets_are_not_exposed_and_best_sh_still_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SHELL_SECRET)
    project, where = Project(tmp_path), tmp_path / "run"
    (tmp_path / "train.py").write_text(LOGS + TRAIN)
    command = [sys.executable, "-S", "-E", str(tmp_path / "train.py"), "{folder}", "--api-key", COMMAND_SECRET]
    envs = {"HF_TOKEN": SHELL_SECRET, "WANDB_API_KEY": SPEC_SECRET}
    spec = project.spec(control={"max_trials": 2, "repeats": 0}, train={"command": command}, envs=envs)
    api.tune(spec, run_dir=where)

    logged = (where / "trials/0/stdout.log").read_text()
    assert all(secret in logged for secret in (SHELL_SECRET, SPEC_SECRET, COMMAND_SECRET))
    shared_files = [
        "result.json",
        "report.html",
        "report.txt",
        "best.sh",
        "journal.log",
        "task.json",
        "best/launch.json",
        "trials/0/launch.json",
    ]
    texts = {name: (where / name).read_text() for name in shared_files}
    for name, text in texts.items():
        assert not [secret for secret in (SHELL_SECRET, SPEC_SECRET, COMMAND_SECRET) if secret in text], name
    for name in ("spec.yaml", "best.yaml", "best/secrets.sh"):
        assert stat.S_IMODE((where / name).stat().st_mode) == 0o600, name
    assert SHELL_SECRET not in (where / "best/secrets.sh").read_text()

    completed = subprocess.run([where / "best.sh"], capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0
    assert all(secret in completed.stdout for secret in (SHELL_SECRET, SPEC_SECRET, COMMAND_SECRET))
    clean_environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    incomplete = subprocess.run([where / "best.sh"], capture_output=True, text=True, timeout=60, env=clean_environment)
    assert incomplete.returncode != 0
    assert "HF_TOKEN: set it" in incomplete.stderr

    monkeypatch.setenv("HF_TOKEN", "another")  # a new token is no other task
    project.spec(control={"max_trials": 2, "repeats": 0}, train={"command": command}, envs={**envs, "HF_TOKEN": "new"})
    api.tune(spec, run_dir=where)
