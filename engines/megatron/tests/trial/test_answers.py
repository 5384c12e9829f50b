"""Trials whose program computes something else have other answers, and trials in another layout have the same."""

from pathlib import Path
from typing import Any

import pytest
from flagcore_training.reading import compared, program_record

from engines.megatron.tests.trial import trial_jobs
from engines.megatron.tests.trial.test_trial_parity import DENSE_LAYOUTS, DP2, EP2, EXPERT_LAYOUTS, TP2
from engines.megatron.tests.trial.trial_jobs import DENSE, EXPERTS, NEEDS_MEGATRON
from flagcore.domain.trial import Answers
from tests import tasks

pytestmark = [NEEDS_MEGATRON, pytest.mark.slow, pytest.mark.costly, pytest.mark.together("training")]

PLANTED = Path(__file__).parent / "planted"
MODELS: dict[str, dict[str, Any]] = {"dense": DENSE, "experts": EXPERTS}
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lost_block": ("dense", {}),
    "dropped_tokens": ("experts", {}),
    "lost_part": ("dense", DP2),
    "other_seeds": ("dense", TP2),
}
CLEAN: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("dense", DENSE_LAYOUTS[name]) for name in ("micro batches of 1", "data", "tensor, sequence")},
    **{name: ("dense", DENSE_LAYOUTS[name]) for name in ("pipeline", "context", "data, overlaps")},
    "experts": ("experts", EXPERT_LAYOUTS["expert"]),
    "experts, micro batches of 1": ("experts", {**DP2, **EP2, "micro_batch_size": 1}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trials of all cases, of both models without a change, and of one that learns nothing."""
    folder = tmp_path_factory.mktemp("answers")
    cases = {**{name: (name, {}) for name in MODELS}, **FAULTS, **{f"clean {name}": CLEAN[name] for name in CLEAN}}
    cases["constant"] = ("dense", {})
    train = {"train_iters": 4}
    jobs = {
        name: trial_jobs.make_job(folder / name, MODELS[model], train=train, **knobs)
        for name, (model, knobs) in cases.items()
    }
    codes, stderr = trial_jobs.run_jobs(folder, jobs, PLANTED)
    assert {name for name, code in codes.items() if code} == {"constant"}, stderr
    assert "stay constant" in stderr
    return folder


def answers(folder: Path, name: str, model: str) -> Answers:
    task = tasks.task(precision="fp32")
    found = compared(task, "rounding", program_record(str(folder / name)), program_record(str(folder / model)))
    assert found is not None
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_has_other_answers(folder: Path, fault: str) -> None:
    found = answers(folder, fault, FAULTS[fault][0])
    assert found.difference > 2.0 * found.limit


@pytest.mark.parametrize("name", CLEAN)
def test_other_layouts_have_the_same_answers(folder: Path, name: str) -> None:
    found = answers(folder, f"clean {name}", CLEAN[name][0])
    assert found.difference < 0.5 * found.limit
