"""Servers that another client loads, whose report is read instead."""

import sys
from pathlib import Path

import pytest

from flagcore.domain.trial import Trial, TrialState
from tests.engines.serving.trial import trials
from tests.engines.serving.trial.test_misbehaving_servers import all_gone

pytestmark = pytest.mark.slow

CLIENT = (sys.executable, str(Path(__file__).with_name("client.py")), "{url}", "{report}")


def run(folder: Path, *words: str, instances: int = 1) -> Trial:
    return trials.run(trials.platform(folder, "well", client=(*CLIENT, *words)), folder, instances=instances)


@pytest.fixture
def _router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with the router's name, which answers as a server does."""
    program = tmp_path / "bin" / "vllm-router"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {trials.SERVER} good "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


@pytest.mark.usefixtures("_router")
@pytest.mark.parametrize("instances", [1, 2])
def test_the_figures_of_its_report_match_the_trial(instances: int, tmp_path: Path) -> None:
    done = run(tmp_path, instances=instances)
    assert done.state is TrialState.MEASURED, done.reason
    assert done.measurement is not None
    assert done.measurement.figures["output_tokens_per_s"] == 4.0
    assert done.measurement.figures["ttft_s.p99"] == pytest.approx(0.03)
    assert (tmp_path / "trial" / "router.log").exists() == (instances > 1)
    assert all_gone(tmp_path)


def test_several_instances_need_a_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    done = run(tmp_path, instances=2)
    assert (done.state, done.measurement) == (TrialState.INVALID, None)
    assert "router cannot be started: vllm-router" in str(done.reason)
    assert all_gone(tmp_path)


@pytest.mark.parametrize(
    ("behaviour", "reason"), [("fails", "ended with 1: the client cannot do this"), ("lacks", "report.json")]
)
def test_a_client_that_fails_leaves_no_figures(behaviour: str, reason: str, tmp_path: Path) -> None:
    done = run(tmp_path, behaviour)
    assert (done.state, done.measurement) == (TrialState.FAILED, None)
    assert reason in str(done.reason)
    assert all_gone(tmp_path)


def test_a_missing_client_is_invalid(tmp_path: Path) -> None:
    done = trials.run(trials.platform(tmp_path, "well", client=("/no/such/client",)), tmp_path)
    assert (done.state, done.measurement) == (TrialState.INVALID, None)
    assert "serve.client.command: /no/such/client cannot be started" in str(done.reason)
