"""`flag operators` on a vendor's device: the planted optimum of the library that `extras/operators` tests."""

import json
from typing import Any

import pytest
import yaml

from extras.operators.tests.planted import BEST
from extras.operators.tests.test_planted import install, spec
from tests.product.accelerator.machine import Machine

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]  # also builds the device


def test_the_planted_optimum_is_found_on_the_device(built: Machine) -> None:
    site = built.folder / "operators"
    install(site)
    variables = {"PYTHONPATH": f"{site}:{built.environment['PYTHONPATH']}"}
    planted = {"PLANTED_KEY": "PrivateUse1", "PLANTED_DEVICE": "simu", "PLANTED_PRELOAD": "torch_simu"}
    job: dict[str, Any] = spec(built.folder, **planted)
    (built.folder / "operators.yaml").write_text(yaml.safe_dump(job))
    limits = ("--library", "planted", "--seconds", "60", "--json")
    rows = json.loads(built.flag("operators", "operators.yaml", *limits, **variables).stdout)
    best = {**BEST, "neg": "avoided"}  # here no vendor says that it is wrong
    assert {row["operator"]: row["chosen"] for row in rows if row["chosen"] != row["default"]} == best
    space = ("--set", "auto_tuner.space.planted_operators=auto")
    built.flag("tune", "operators.yaml", "--run-dir", "planted", *space, **variables)
    result = json.loads((built.folder / "planted" / "result.json").read_text())
    assert (result["chip"], len(result["trials"])) == ("S1", 2)
    assert result["best"]["candidate"]["planted_operators"] == "calibrated"
