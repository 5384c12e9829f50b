"""Rules whose knobs and messages are rows of a table."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from flagcore_training.knobs import AUTOS, RuleTable

from tests.tasks import task

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
