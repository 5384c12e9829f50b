"""`flag calibrate --collectives` with the benchmark replaced: which values are chosen, and what becomes of them.

`tests/product/accelerator/test_collectives.py` runs the benchmark.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_vendorkit import choices
from flagcore_vendorkit.calibration import collectives
from flagcore_vendorkit.engines import Listed, VariableKnob

from flagcore import api
from flagcore.domain.chip import Source
from flagcore.errors import RunError, UsageError
from tests.checks import refuses
from tests.product.cli.conftest import Flag
from tests.product.cli.conftest import flag as flag
from tests.product.cli.conftest import project as project

VALUES: dict[str, dict[int | str, float]] = {
    "ACME_ALGO": {"tree": 0.4},  # rounds sums differently
    "ACME_BUFFER": {1: 0.8, 2: 1.2},
    "ACME_CHANNELS": {4: 0.5, 8: 0.7, 16: 0.99},
    "ACME_PROTO": {"wrong": 0.1, "crashes": 0.1},
    "ACME_SHM": {0: 0.9},  # no gain where ACME_CHANNELS is set
}
SPEC: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 512},
    "cluster": {"chip": "auto", "devices_per_node": 2},
    "train": {"engine": "megatron", "seq_length": 64, "global_batch_size": 4, "precision": "fp32"},
    "auto_tuner": {
        "space": {"tensor_model_parallel_size": [1, 2]},
        "baseline": {"tensor_model_parallel_size": 2, "micro_batch_size": 1},
    },
}


def run(name: str, job: Mapping[str, Any], environment: Mapping[str, str], timeout_seconds: float) -> list[list[Any]]:
    assert (name, job["devices"]) == ("collectives", 2)
    factor, proto = 1.0, environment.get("ACME_PROTO")
    for variable, values in VALUES.items():
        if variable != "ACME_SHM" or "ACME_CHANNELS" not in environment:
            factor *= {str(value): each for value, each in values.items()}.get(environment.get(variable, ""), 1.0)
    if proto == "crashes":
        raise RunError("crashed")
    return [[1e-3 * call[3] * factor, proto, environment.get("ACME_ALGO")] for call in job["calls"]]


@pytest.fixture(autouse=True)
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        VariableKnob(
            variable=name, values=tuple(values), says="x", risk="y", source=Source(kind="published", detail="z")
        )
        for name, values in VALUES.items()
    ]
    listed = [Listed(scope=each, knob=each.knob, is_screened=True) for each in rows]
    monkeypatch.setattr(collectives, "all_knobs", lambda package: listed)
    monkeypatch.setattr(collectives, "run_benchmark", run)
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("own", "rounding", "expected", "factor"),
    [
        ({}, False, {"ACME_BUFFER": "1", "ACME_CHANNELS": "4"}, 0.4),
        ({"ACME_CHANNELS": "4"}, False, {"ACME_BUFFER": "1"}, 0.8),
        ({}, True, {"ACME_ALGO": "tree", "ACME_BUFFER": "1", "ACME_CHANNELS": "4"}, 0.16),
    ],
)
def test_the_best_right_values_are_combined(
    own: Mapping[str, str], rounding: bool, expected: Mapping[str, str], factor: float
) -> None:
    choice, file = collectives.calibrate_collectives({**SPEC, "envs": dict(own)}, rounding=rounding)
    assert choice.environment == expected
    assert choice.time[0] == pytest.approx(factor, rel=0.2)  # the engine does not add calls up alone
    assert "tp_comm_s" in choice.part
    why = {row["setting"]: row["excluded"] for row in choice.rows}
    assert not {setting for setting in why for name in own if name in setting}
    assert {setting for setting, text in why.items() if text} == {"ACME_PROTO=wrong", "ACME_PROTO=crashes"} | (
        set() if rounding else {"ACME_ALGO=tree"}
    )
    assert [(path, each.environment) for path, each in choices.choices()] == [(file, expected)]


def test_a_choice_is_a_knob_that_predicts_the_time_of_collectives() -> None:
    choice, _ = collectives.calibrate_collectives(SPEC)
    found = api.estimate(api.changed_spec(SPEC, {"auto_tuner.space.collectives": "auto"}), top=1000)
    parts = {
        each["candidate"]["collectives"]: each["time"]
        for each in found.candidates
        if (each["candidate"]["tensor_model_parallel_size"], each["candidate"]["micro_batch_size"]) == (2, 1)
    }
    usual, better = parts[None], parts[choices.CALIBRATED]
    assert better["tp_comm_s"] == pytest.approx(choice.time[0] * usual["tp_comm_s"])
    assert better["compute_s"] == usual["compute_s"]
    with refuses("envs.ACME_CHANNELS"):
        api.estimate(api.changed_spec(SPEC, {"auto_tuner.space.collectives": "auto", "envs.ACME_CHANNELS": 8}))


def test_nothing_to_compare_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no collectives"):
        collectives.calibrate_collectives(api.changed_spec(SPEC, {"cluster.devices_per_node": 1, "auto_tuner": {}}))
    monkeypatch.setattr(collectives, "all_knobs", lambda package: [])
    with pytest.raises(UsageError, match="no variable"):
        collectives.calibrate_collectives(SPEC)


@pytest.mark.parametrize("options", [("--rounding",), ("--collectives", "job.yaml", "--devices", "2")])
def test_options_that_do_nothing_are_refused(options: tuple[str, ...], flag: Flag) -> None:
    assert flag("calibrate", *options).code == 2


def test_the_command_shows_each_setting(flag: Flag, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(SPEC))
    rows = json.loads(flag("calibrate", "--collectives", str(tmp_path / "job.yaml"), "--json").worked().out)
    assert {row["setting"] for row in rows} >= {"", "ACME_ALGO=tree", "ACME_CHANNELS=4 ACME_BUFFER=1"}
