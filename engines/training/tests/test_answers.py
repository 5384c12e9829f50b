"""What counts as other answers of a training trial, for flagcore's program and for the log of a user's
command. Rules whose knobs and messages are rows of a table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flagcore_training.knobs import AUTOS, RuleTable
from flagcore_training.reading import Record, compared, warmup_of_fewer

from flagcore import plugins
from flagcore.domain.knob import ANSWERS
from flagcore.domain.spec import Control
from flagcore.errors import FlagError
from tests import tasks
from tests.tasks import task

OWN = Record((9.79, 9.79, 9.6, 9.4), (1.0, 1.0, 1.1, 1.2), is_own=True)
LOG = Record((9.79, 9.7, 9.6, 9.4), (1.0, 1.0, 1.1, 1.2))


def record(like: Record, losses: dict[int, Any] | None = None, norms: dict[int, Any] | None = None) -> Record:
    """Return a record with some figures multiplied."""
    changed = [
        [value * (factors or {}).get(step, 1.0) for step, value in enumerate(figures) if value is not None]
        for figures, factors in ((like.losses, losses), (like.norms, norms))
    ]
    return Record(*changed, is_own=like.is_own)


@pytest.mark.parametrize(
    ("change", "base", "losses", "norms", "is_same"),
    [
        ("rounding", OWN, {0: 1 + 8e-6}, {0: 1 + 8e-4}, True),
        ("rounding", OWN, {0: 1 + 1.2e-5}, {}, False),
        ("seeds", OWN, {}, {1: 1 + 1.2e-3}, False),
        ("rounding", OWN, {3: 1.009}, {2: 1.5}, True),
        ("rounding", OWN, {3: 1.011}, {}, False),
        ("rounding", record(OWN, {1: 1 + 1e-4}), {0: 1 + 4e-4}, {}, True),  # its own noise is larger
        ("changes", OWN, {0: 1.1, 3: 1.009}, {0: 1.09}, True),
        ("changes", OWN, {3: 1.011}, {}, False),
        ("changes", LOG, {}, {0: 1.11}, False),
        ("rounding", LOG, {0: 1.1}, {0: 1.09}, True),
        ("seeds", LOG, {}, {0: 2.0}, True),
        ("seeds", record(LOG, {2: 1.03}), {3: 1.02}, {}, True),  # losses differ as much from step to step
        ("seeds", LOG, {3: 1.02}, {}, False),
    ],
)
def test_answers_differ_by_more_than_noise_or_the_limit(
    change: str, base: Record, losses: dict[int, float], norms: dict[int, float], is_same: bool
) -> None:
    found = compared(tasks.task(precision="fp32"), change, record(base, losses, norms), base)
    assert found is not None
    assert (found.difference <= found.limit) == is_same


def test_the_limit_is_that_of_the_spec() -> None:
    task = tasks.task(precision="fp32", control=Control(answers=0.03))
    found = compared(task, "changes", record(LOG, {3: 1.02}), LOG)
    assert found is not None
    assert found.limit == 0.03
    assert found.difference == pytest.approx(0.02)


def test_a_log_without_losses_cannot_tell() -> None:
    task, silent = tasks.task(), Record((), ())
    assert compared(task, "seeds", silent, LOG) is None
    with pytest.raises(FlagError, match="no loss"):
        compared(task, "changes", silent, LOG)
    with pytest.raises(FlagError, match="no step changes"):
        compared(task, "rounding", Record((9.79,) * 3, ()), LOG)


def test_knobs_that_say_so_change_answers() -> None:
    says = ("changes numerics", "change the answers", "changes the answers")
    for name, engine in plugins.engines().items():
        for knob in engine.knobs:
            assert knob.answers in ANSWERS, (name, knob.name)
            assert knob.answers == "changes" or not any(text in knob.help for text in says), (name, knob.name)


@pytest.mark.parametrize(("steps", "at_most", "expected"), [(8, 2, 2), (3, 2, 2), (2, 2, 1), (1, 2, 1), (2, 0, 0)])
def test_fewer_steps_have_fewer_warm_up_steps(steps: int, at_most: int, expected: int) -> None:
    assert warmup_of_fewer(steps, at_most) == expected


ENGINES = Path(__file__).parents[2]
TABLES = sorted(ENGINES.glob("*/flagcore_*/**/rules.yaml"))


def test_a_rule_has_the_knobs_and_the_message_of_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_rules").mkdir()
    (tmp_path / "toy_rules/__init__.py").touch()
    (tmp_path / "toy_rules/rules.yaml").write_text('few: {knobs: PP TP, message: "{PP} x {TP} is at most {most}"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    table = RuleTable("toy_rules", {"PP": "stages", "TP": "parts"})
    rule = table("few", lambda c: c["stages"] > 1, most=8)
    assert (rule.name, rule.knobs, rule.message) == ("few", ("stages", "parts"), "stages x parts is at most 8")
    assert rule.broken({"stages": np.array([1, 2])}).tolist() == [False, True]
    assert table("few", rule.broken, "{PP} of {count}", count=3).message == "stages of 3"


@pytest.mark.parametrize("file", TABLES, ids=lambda file: str(file.relative_to(ENGINES).parent))
def test_each_row_belongs_to_a_rule(file: Path) -> None:
    code = "".join(each.read_text() for each in file.parent.glob("*.py"))
    assert [name for name in yaml.safe_load(file.read_text()) if f'"{name}"' not in code] == []


@pytest.mark.parametrize(("layers", "most"), [(96, 96), (1000, 200)])
def test_a_deep_model_has_few_numbers_of_layers_to_try(layers: int, most: int) -> None:
    spec = task().spec
    deep = replace(task(), spec=replace(spec, model=replace(spec.model, num_layers=layers)))
    values = AUTOS["layers"](deep)
    assert values[:96] == tuple(range(1, 97))
    assert len(values) <= most
    assert values[-1] <= layers
