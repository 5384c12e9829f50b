"""The toy engine runs its program, which fails as its settings say."""

import subprocess
from pathlib import Path

import pytest
from flagcore_testing.toy import ENGINE

from flagcore.domain.launch import Exit, classify
from flagcore.domain.trial import TrialState
from tests import tasks


@pytest.mark.parametrize(
    ("does", "where", "state"),
    [
        ("crash", "1x1", TrialState.FAILED),
        ("invalid", "", TrialState.INVALID),
        ("oom", "", TrialState.OUT_OF_MEMORY),
        ("crash", "2x1", None),
    ],
)
def test_a_trial_fails_as_its_settings_say(does: str, where: str, state: TrialState | None, tmp_path: Path) -> None:
    task, candidate = tasks.task(settings={"does": does, "where": where}), tasks.candidate(data_parallel_size=4)
    launch = ENGINE.launch(tasks.platform(task), candidate, str(tmp_path))
    done = subprocess.run(launch.argv, capture_output=True, timeout=60)
    if state is None:
        measured = ENGINE.read(task, candidate, str(tmp_path))
        assert (len(measured.step_times_s), measured.effective["global_batch_size"]) == (4, 8)
    else:
        end = Exit(code=done.returncode, ended_by=None, duration_s=1.0)
        assert classify(end, done.stderr.decode(), ENGINE.failure_patterns())[0] is state
