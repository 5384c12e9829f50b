"""A knob that only a plugin knows, from a plugin that the core has never heard of: predicted, launched and learned.
All plugins and engines together."""

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml

from flagcore import api, plugins
from flagcore.contracts import Problem, probes_of
from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.features import features
from flagcore.domain.knob import Effect, Factor, Knob, Requirement
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, IntArray
from flagcore.domain.spec import Task
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.errors import SpecError
from flagcore.plugins import LoadedPlugins, engine_of, here, load_plugins, names
from flagcore.report.explanation import knobs_text
from flagcore.spec.convert import parse_spec
from flagcore.tuner.effects import effects_of_row
from flagcore.tuner.problem import build_problem, candidate_columns
from flagcore.tuner.stages.build import build, legality
from flagcore.tuner.stages.predict import predict, predict_columns, predict_components
from flagcore.tuner.stages.prune import prune, prune_by_trials
from tests.checks import refuses
from tests.plugins.conftest import Install
from tests.product import tasks
from tests.product.tasks import ENGINES

FUSED = Effect(part="tp_comm_s", time=Factor(value=0.5, low=0.4, high=0.8))
KNOB = Knob(
    name="acme_fused",
    neutral=False,
    effects={True: FUSED},
    help="fuses",
    source=tasks.SOURCE,
    requires=(Requirement(knob="tensor_model_parallel_size", at_least=2),),
)
SCHEDULE = Knob(
    name="acme_schedule",
    effects={
        "zb-h1": Effect(settings={"pipeline_schedule": "zb-h1"}),
        "wait": Effect(environment={"ACME_WAIT": "1"}, memory=Factor(value=0.9, low=0.8, high=1.0)),
    },
    help="orders",
    source=tasks.SOURCE,
)
PLUGIN = """
    from flagcore.domain.chip import Source
    from flagcore.domain.knob import Effect, Factor, Knob
    from flagcore.hooks import hookimpl

    SOURCE = Source(kind="published", detail="made up")

    @hookimpl
    def flagcore_knobs(chip, engine):
        if chip.name != "cpu" or engine != "megatron":
            return None
        on = Effect(flags=("--acme-fused",), time=Factor(value=0.9, low=0.8, high=1.0))
        wait = Effect(environment={"ACME_WAIT": "2"})
        secret = Effect()
        return [
            Knob(name="acme_fused", neutral=False, effects={True: on}, help="fuses", source=SOURCE),
            Knob(name="acme_wait", effects={2: wait}, help="waits", source=SOURCE),
            Knob(name="acme_secret", neutral=False, effects={True: secret}, help="hides", source=SOURCE),
        ]
"""
SPEC: dict[str, Any] = {
    "model": tasks.SHAPE,
    "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "2GiB"},
    "train": {"engine": "megatron", "seq_length": 32, "global_batch_size": 8, "precision": "fp32"},
    "auto_tuner": {
        "strategy": "predicted",
        "space": {
            "data_parallel_size": 2,
            "micro_batch_size": 4,
            "use_distributed_optimizer": False,
            "use_recompute": False,
        },
        "control": {"train_iters": 3, "max_trials": 4, "repeats": 0},
    },
}


def with_space(base: Path, **changes: Any) -> Path:
    """Write the spec with more in its space (`space`) or other training (`train`)."""
    spec = json.loads(json.dumps(SPEC))
    spec["auto_tuner"]["space"] |= changes.get("space", {})
    spec["train"] |= changes.get("train", {})
    file = base / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def columns_of(task: Task, values: Mapping[str, Any]) -> dict[str, IntArray]:
    return candidate_columns(tasks.platform(task), values)


def predicted_rows(task: Task, columns: Mapping[str, IntArray]) -> Predictions:
    return predict_columns(tasks.platform(task), columns)


def predicted(*knobs: Knob, **values: Any) -> Any:
    """Predict one candidate of TP 2 and PP 2 with values of knobs."""
    task = tasks.task(space={"acme_fused": "auto", "acme_schedule": (None, "zb-h1", "wait")})
    task = replace(task, knobs=knobs)
    own = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    return predicted_rows(task, columns_of(task, {**own, **values})).row(0)


def test_an_effect_on_a_part_of_the_step_shifts_that_part_and_widens_the_interval() -> None:
    off, on = predicted(KNOB), predicted(KNOB, acme_fused=True)
    assert on.time_s["tp_comm_s"] == pytest.approx(0.5 * off.time_s["tp_comm_s"])
    assert on.step_time_s == pytest.approx(sum(on.time_s.values()))
    assert on.high_s / on.step_time_s > off.high_s / off.step_time_s
    assert on.low_s / on.step_time_s < off.low_s / off.step_time_s


def test_settings_of_a_choice_predict_with_the_cores_own_formula() -> None:
    off, on = predicted(SCHEDULE), predicted(SCHEDULE, acme_schedule="zb-h1")
    assert on.time_s["pp_bubble_s"] < off.time_s["pp_bubble_s"]
    task = tasks.task(settings={"pipeline_schedule": "zb-h1"})
    own = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    assert on.step_time_s == predicted_rows(task, columns_of(task, own)).row(0).step_time_s


def test_settings_of_a_choice_restrict_only_candidates_with_that_choice() -> None:
    knob = replace(SCHEDULE, effects={"dualpipev": Effect(settings={"pipeline_schedule": "dualpipev"})})
    task = replace(tasks.task(space={"acme_schedule": (None, "dualpipev")}, global_batch_size=8), knobs=(knob,))
    (rule,) = [each for each in legality(tasks.platform(task)).rules if each.name == "acme_schedule_pipeline_schedule"]
    own = {"data_parallel_size": 1, "pipeline_model_parallel_size": 4}
    cases = {(None, 8): False, ("dualpipev", 1): False, ("dualpipev", 2): True}
    for (value, size), broken in cases.items():
        columns = columns_of(task, {**own, "micro_batch_size": size, "acme_schedule": value})
        assert rule.broken(columns).tolist() == [broken]
    assert "acme_schedule = dualpipev: pipeline_schedule: dualpipev needs" in rule.message


def test_a_setting_overridden_by_a_choice_is_validated_with_its_new_value() -> None:
    updated = Effect(settings={"pipeline_schedule": "zb-h1"})
    knob = replace(SCHEDULE, effects={"zb-h1": updated, "both": Effect(settings={"offload_stages": "0,3"})})
    task = replace(
        tasks.task(settings={"pipeline_schedule": "dualpipe", "offload_stages": "0"}, global_batch_size=4),
        knobs=(knob,),
    )

    def broken(value: str | None, **sizes: int) -> set[str]:
        columns = columns_of(task, {"micro_batch_size": 1, **sizes, "acme_schedule": value})
        return {rule.name for rule in legality(tasks.platform(task)).rules if rule.broken(columns).any()}

    four = {"pipeline_model_parallel_size": 4}
    assert "pipeline_schedule" in broken(None, **four)
    assert not {"pipeline_schedule", "acme_schedule_pipeline_schedule"} & broken("zb-h1", **four)
    two = {"pipeline_model_parallel_size": 2}
    assert not {"offload_stages", "acme_schedule_offload_stages"} & broken(None, **two)
    assert "offload_stages" in broken("both", **two)


def test_memory_by_component_and_rank_follows_the_schedule_knob() -> None:
    knob = replace(SCHEDULE, effects={"zb-2p": Effect(settings={"pipeline_schedule": "zb-2p"})})
    task = replace(tasks.task(space={"acme_schedule": (None, "zb-2p")}), knobs=(knob,))
    engine, costs, first = engine_of(task.spec.work), tasks.costs(task), np.array([0])
    own = {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    off, on = (columns_of(task, {**own, "acme_schedule": value}) for value in (None, "zb-2p"))
    both = {name: np.concatenate([on[name], off[name]]) for name in on}
    held = predict_components(tasks.platform(task), both, np.array([0, 0]))["ffn"]["activation_bytes"]
    ffn_bytes = [
        predict_components(tasks.platform(task), one, first)["ffn"]["activation_bytes"][0] for one in (on, off)
    ]
    assert held.tolist() == ffn_bytes
    assert held[0] == 1.5 * held[1]
    with_setting = tasks.task(settings={"pipeline_schedule": "zb-2p"})
    bare = probes_of(engine_of(with_setting.spec.work))
    expected = bare.predict(
        with_setting, candidate_columns(tasks.platform(with_setting), own), 0, tasks.costs(with_setting)
    )
    ranks = [probes_of(engine).predict(task.for_engine(effects_of_row(task, one)), one, 0, costs) for one in (on, off)]
    assert ranks[0] == expected != ranks[1]


def test_an_effect_on_memory_changes_the_memory_in_use() -> None:
    off, on = predicted(SCHEDULE), predicted(SCHEDULE, acme_schedule="wait")
    assert on.peak_allocated_bytes == pytest.approx(0.9 * off.peak_allocated_bytes)
    assert on.device_used_bytes < off.device_used_bytes


def test_many_rows_are_predicted_in_their_own_order() -> None:
    task = replace(tasks.task(space={"acme_schedule": (None, "zb-h1", "wait")}), knobs=(SCHEDULE,))
    own = {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    each = [columns_of(task, {**own, "acme_schedule": value}) for value in ("wait", None, "zb-h1", None)]
    columns = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
    expected = [predicted_rows(task, one).row(0).step_time_s for one in each]
    assert predicted_rows(task, columns).step_time_s.tolist() == pytest.approx(expected)


def test_requirements_of_a_knob_are_a_rule(install: Install) -> None:
    problem = with_predictions(install, {"acme_fused": [False, True]})
    assert problem.space.illegal.get("acme_fused_needs_tensor_model_parallel_size", 0) == 0
    rules = legality(tasks.platform(replace(problem.task, knobs=(KNOB,)))).rules
    (rule,) = [each for each in rules if each.name == "acme_fused_needs_tensor_model_parallel_size"]
    columns = {"acme_fused": np.array([0, 1, 1]), "tensor_model_parallel_size": np.array([1, 1, 2])}
    assert rule.broken(columns).tolist() == [False, True, False]


def test_a_knob_of_experts_is_illegal_for_dense_models() -> None:
    task = replace(tasks.task(space={"acme_fused": (False, True)}), knobs=(replace(KNOB, experts_only=True),))
    (rule,) = [each for each in legality(tasks.platform(task)).rules if each.name == "acme_fused_without_experts"]
    assert rule.broken({"acme_fused": np.array([0, 1])}).tolist() == [False, True]


def test_auto_contains_launchable_values_and_a_missing_knob_is_off(install: Install) -> None:
    problem = with_predictions(install, {"acme_fused": "auto", "acme_wait": "auto"})
    assert problem.space.choices["acme_wait"] == (None, 2)
    columns = problem.space.columns()
    assert set(columns["acme_wait"].tolist()) == {0, 2}
    assert set(columns["acme_fused"].tolist()) == {0}, "without a train.command no flag reaches a trial"
    assert "acme_secret" not in columns


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({"acme_fused": 1}, "use false, true"),
        ({"acme_wait": "three"}, "use null, 2"),
        ({"acme_wait": 0.5}, "a whole number"),
    ],
)
def test_a_wrong_value_is_reported_with_the_right_ones(
    install: Install, tmp_path: Path, space: dict[str, Any], says: str
) -> None:
    install("flagcore-acme", {"acme": "acme_hooks"}, {"acme_hooks": PLUGIN})
    with pytest.raises(SpecError, match=says):
        api.estimate(with_space(tmp_path, space=space))


def test_a_knob_without_a_flag_is_estimated_but_not_recommended_or_tuned(install: Install, tmp_path: Path) -> None:
    install("flagcore-acme", {"acme": "acme_hooks"}, {"acme_hooks": PLUGIN})
    file = with_space(tmp_path, space={"acme_secret": [False, True]})
    estimate = api.estimate(file)
    assert {each["candidate"]["acme_secret"] for each in estimate.candidates} == {False, True}
    assert estimate.recommended is not None
    assert estimate.recommended["candidate"]["acme_secret"] is False
    with pytest.raises(SpecError, match="no source documents"):
        api.tune(file, run_dir=tmp_path / "run")


def test_explain_reports_every_knob_of_the_chip(install: Install, tmp_path: Path) -> None:
    install("flagcore-acme", {"acme": "acme_hooks"}, {"acme_hooks": PLUGIN})
    found = {knob["knob"]: knob for knob in api.explain(with_space(tmp_path, space={"acme_wait": 2})).knobs}
    assert found["acme_wait"]["in_space"]
    assert not found["acme_fused"]["in_space"]
    assert "train.command" in found["acme_fused"]["not_launched"]["True"]
    assert found["acme_secret"]["source"] == "published: made up"


def test_a_source_of_several_knobs_in_a_row_is_written_once() -> None:
    knob = {"knob": "acme_a", "help": "x", "claim": "", "needs": [], "effect": "", "source": "published: made up"}
    knob |= {"in_space": False, "effects": [], "not_launched": {}}
    text = knobs_text([knob, {**knob, "knob": "acme_b"}, {**knob, "knob": "acme_c", "source": "measured: here"}])
    assert (text.count("published: made up"), text.count("measured: here")) == (1, 1)


def test_a_trial_prunes_only_its_own_value_of_an_unordered_knob() -> None:
    task = replace(
        tasks.task(space={"acme_fused": (False, True), "micro_batch_size": (1, 2), "use_recompute": (False,)}),
        knobs=(replace(KNOB, requires=()),),
    )
    engine = engine_of(task.spec.work)
    legal = legality(tasks.platform(task))
    space = build(legal.axes, legal.rules, legal.merges)
    predictions = predict(tasks.platform(task), space)
    without_trials = prune(space, predictions, ())
    on = next(row for row in range(len(space)) if space.candidate(row).as_dict()["acme_fused"])
    full = Trial(number=0, candidate=space.candidate(on), role=Role.SEARCH, state=TrialState.OUT_OF_MEMORY)
    pruned = prune_by_trials(tasks.problem(tasks.platform(task), space, predictions), [full])
    removed = np.setdiff1d(without_trials.open_rows, pruned.open_rows)
    assert removed.size
    assert space.columns(removed)["acme_fused"].all()
    rows = np.arange(len(space))
    columns = space.columns(rows)
    known = features(space.axes, columns, predictions.take(rows), engine.sizes(task.for_engine(), columns))
    assert known.knobs["acme_fused"].tolist() == columns["acme_fused"].tolist()
    codes = {"batch_size": np.array([0, 512, 2048])}  # 0 is the engine's own choice
    known = features([Axis(knob="batch_size", values=(512, 2048))], codes, predictions.take(rows[:3]), {})
    own, low, high = known.knobs["batch_size"]
    assert low < own < high


@pytest.mark.parametrize(("settings", "allowed"), [({}, {False}), ({"overlap_grad_reduce": True}, {False, True})])
def test_a_setting_of_the_spec_can_meet_a_requirement(settings: dict[str, bool], allowed: set[bool]) -> None:
    knob = replace(KNOB, requires=(Requirement(knob="overlap_grad_reduce", one_of=(True,)),))
    task = tasks.task(space={"acme_fused": (False, True)}, settings=settings)
    legal = legality(tasks.platform(replace(task, knobs=(knob,))))
    assert set(build(legal.axes, legal.rules, legal.merges).columns()["acme_fused"].astype(bool)) == allowed


SERVES = """
    from flagcore.domain.chip import Source
    from flagcore.domain.knob import Effect, Factor, Knob
    from flagcore.hooks import hookimpl

    @hookimpl
    def flagcore_knobs(chip, engine):
        slow = Effect(environment={"ACME_SLOW": "1"}, time=Factor(value=2.0, low=1.5, high=3.0))
        source = Source(kind="published", detail="made up")
        return [Knob(name="acme_slow", neutral=False, effects={True: slow}, help="waits", source=source)]
"""


@pytest.mark.slow
def test_serving_engines_have_knobs_of_plugins(install: Install, tmp_path: Path) -> None:
    install("flagcore-acme", {"acme": "acme_hooks"}, {"acme_hooks": SERVES})
    spec = {
        "model": SPEC["model"],
        "cluster": {"chip": "H100-SXM", "devices_per_node": 1},
        "serve": {"engine": "vllm", "profile": {"input_len": 64, "output_len": 16, "concurrency": 2}},
        "auto_tuner": {"space": {"acme_slow": "auto"}},
    }
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    found = {each["candidate"]["acme_slow"]: each for each in api.estimate(file).candidates}
    assert found[True]["step_time_s"]["value"] == pytest.approx(2 * found[False]["step_time_s"]["value"])
    assert found[True]["tpot_s"]["p50"] == pytest.approx(2 * found[False]["tpot_s"]["p50"])
    assert found[True]["output_tokens_per_s"] == pytest.approx(found[False]["output_tokens_per_s"] / 2)
    file.write_text(yaml.safe_dump(spec | {"auto_tuner": {"space": {"acme_slo": True}}}))
    with refuses("auto_tuner.space.acme_slo") as error:
        api.estimate(file)
    assert "acme_slow" in error.value.fix


LAUNCH = '''
"""A launch command of a user's: takes Megatron's flags and the vendor's, and prints what Megatron prints."""
import argparse, json, os, pathlib, sys

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--train-iters", type=int)
parser.add_argument("--acme-fused", action="store_true")
given, _ = parser.parse_known_args()
pathlib.Path(given.folder, "argv.json").write_text(json.dumps([sys.argv, os.environ.get("ACME_WAIT")]))
print(f"  acme_fused ................................ {given.acme_fused}")
for number in range(1, given.train_iters + 1):
    print(f" iteration {number:8}/{given.train_iters:8} | consumed samples: {number:12} | "
          f"elapsed time per iteration (ms): {100 - 10 * given.acme_fused:.1f} | "
          f"learning rate: 1.000000E-04 | lm loss: 7.0E+00 |")
'''


@pytest.mark.slow
def test_a_trial_gets_the_flag_and_the_variable_of_a_plugins_knobs(install: Install, tmp_path: Path) -> None:
    install("flagcore-acme", {"acme": "acme_hooks"}, {"acme_hooks": PLUGIN})
    (tmp_path / "launch.py").write_text(LAUNCH)
    command = [sys.executable, str(tmp_path / "launch.py"), "{folder}", "{flags}"]
    space = {"acme_fused": "auto", "acme_wait": [None, 2], "data_parallel_size": 2}
    outcome = api.tune(with_space(tmp_path, space=space, train={"command": command}), run_dir=tmp_path / "run")
    trials = outcome.data["trials"]
    assert [trial["state"] for trial in trials] == ["measured"] * 4, [trial["reason"] for trial in trials]
    for trial in trials:
        argv, wait = json.loads((tmp_path / "run" / "trials" / str(trial["number"]) / "argv.json").read_text())
        assert ("--acme-fused" in argv) == trial["candidate"]["acme_fused"]
        assert wait == (str(trial["candidate"]["acme_wait"]) if trial["candidate"]["acme_wait"] else None)
        assert trial["measured"]["effective"]["acme_fused"] == trial["candidate"]["acme_fused"]
    script = (tmp_path / "run" / "best.sh").read_text()
    assert ("--acme-fused" in script.rpartition("exec")[2]) == outcome.data["best"]["candidate"]["acme_fused"]
    assert api.estimate(tmp_path / "run" / "best.yaml").candidates[0]["candidate"] == outcome.data["best"]["candidate"]


def with_predictions(install: Install, space: dict[str, Any]) -> Problem:
    """Pose the spec with the plugin installed."""
    install("flagcore-acme", {"acme": "acme_hooks"}, {"acme_hooks": PLUGIN})
    loaded = load_plugins()
    data = json.loads(json.dumps(SPEC))
    data["auto_tuner"]["space"] |= space
    extra = loaded.knobs_on_any_chip("megatron")
    spec = parse_spec(data, file="spec.yaml", base=Path(), engines=ENGINES, plugin_knobs=extra)
    return build_problem(spec, loaded, engine_of(spec.work))


PLUGINS = Path(__file__).parents[3] / "plugins"
X1 = Chip(name="X1", vendor="acme", devices_per_node=8)
RUNS = EngineSupport(support=Support.YES, device_type="acme", distributed_backend="accl")


def test_devices_are_measured_for_an_engine_of_flagcore_first(install: Install) -> None:
    *_, before = here.target(load_plugins())
    source = "import copy\nfrom flagcore_megatron.engine import ENGINE\nENGINE = copy.copy(ENGINE)\n"
    install("flagcore-acme", {"acme": "flagcore_acme:ENGINE"}, {"flagcore_acme": source}, group=plugins.ENGINES)
    assert names(plugins.ENGINES)[0] == "acme"
    *_, engine = here.target(load_plugins())
    assert engine == before


def test_engines_that_cannot_run_on_a_chip_do_not_say_how_to_measure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "best_chip", lambda *arguments: X1)
    device, trains = Device(index=0, chip="X1"), replace(RUNS, preload=("torch_acme",))
    loaded = SimpleNamespace(
        devices=lambda: (device,),
        find_chip=lambda name: X1,
        engine_support=lambda chip, engine: (
            trains if engine == "megatron" else replace(RUNS, support=Support.IMPOSSIBLE, reason="no serving")
        ),
    )
    assert here.target(cast("LoadedPlugins", loaded)) == (X1, trains, (device,), "megatron")


def test_all_plugins_load_together_and_share_no_chip_name() -> None:
    vendors = [file.parent.name for file in PLUGINS.glob("*/pyproject.toml")]
    assert {"cpu", "nvidia", "metax", "iluvatar", "cambricon"} <= set(vendors)
    loaded = LoadedPlugins.of(
        {vendor: importlib.import_module(f"flagcore_{vendor}.hooks").plugin for vendor in vendors}
    )
    assert {chip.vendor for chip in loaded.chips()} == set(vendors)
    assert loaded.failures == ()
