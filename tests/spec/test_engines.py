"""Specs of a training engine that only a mapping knows: its knobs are the keys of space, baseline and settings."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagcore.contracts import Engine
from flagcore.domain.knob import Knob
from flagcore.errors import SpecError
from flagcore.spec.convert import json_schema, parse_spec
from flagcore.spec.jobs import read_job
from tests.tasks import SHAPE

KNOBS = (
    Knob(name="shards", help="Number of shards.", maximum=64, neutral=1),
    Knob(name="fused", help="Whether kernels are fused.", kind="flag", neutral=False),
    Knob(name="parts", help="What is captured.", kind="words", words=("attn", "moe"), scope=("setting",)),
    Knob(name="dispatch", help="How tokens travel.", kind="word", words=("ring", "tree"), scope=("setting",)),
)


class Named(SimpleNamespace):
    """An engine of which specs need only these rows."""

    with_program = Engine.with_program


ENGINES: Any = {
    "acme": Named(kind="train", knobs=KNOBS),
    "acme-serve": Named(kind="serve", knobs=(Knob(name="slots", help="Sequences at once."),)),
    "acme-rl": Named(kind="rl", knobs=()),
}
TRAIN = {"engine": "acme", "seq_length": 128, "global_batch_size": 8, "precision": "bf16"}


def parse(space: Any = None, baseline: Any = None, *, sections: Any = None, base: Path = Path(), **train: Any) -> Any:
    tuner = {"space": space or {}, "baseline": baseline}
    data = {"model": SHAPE, "train": {**TRAIN, **train}, "auto_tuner": tuner, **(sections or {})}
    return parse_spec(data, file="x", base=base, engines=ENGINES)


def error_of(**arguments: Any) -> SpecError:
    with pytest.raises(SpecError) as error:
        parse(**arguments)
    return error.value


def test_space_baseline_and_settings_have_the_knobs_of_the_engine() -> None:
    spec = parse({"shards": [2, 4]}, {"fused": True}, settings={"dispatch": "tree"})
    assert spec.space == {"shards": (2, 4), "fused": "auto"}
    assert spec.baseline == {"fused": True}
    assert spec.train.settings == {"dispatch": "tree"}


def test_other_keys_and_values_are_errors() -> None:
    error = error_of(space={"shard": 2})
    assert error.key == "auto_tuner.space.shard"
    assert "shards" in error.fix
    assert error_of(space={"tensor_model_parallel_size": 2}).key == "auto_tuner.space.tensor_model_parallel_size"
    assert error_of(baseline={"shards": 65}).key == "auto_tuner.baseline.shards"
    assert error_of(settings={"dispatch": "rings"}).key == "train.settings.dispatch"
    assert error_of(settings={"fused": True}).key == "train.settings.fused"


@pytest.mark.parametrize(
    ("engine", "fix"),
    [("acm", "acme"), ("wholly_else", "acme"), ("acme-serve", "train"), ("acme-rl", "write a rl section")],
)
def test_an_engine_that_is_unknown_or_serves_is_an_error(engine: str, fix: str) -> None:
    error = error_of(engine=engine)
    assert (error.key, error.value) == ("train.engine", engine)
    assert fix in error.fix


def test_the_schema_describes_the_knobs_of_all_engines() -> None:
    schema = json_schema(ENGINES)["$defs"]
    assert schema["Space_acme"]["properties"]["shards"]["description"] == "Number of shards."


def test_the_default_engine_of_a_record_is_the_first_training_engine() -> None:
    record = {
        "id": "a",
        "kind": "train",
        "model": SHAPE,
        "cluster": {"chip": "x", "devices": 8, "devices_per_node": 8},
        "train": {name: value for name, value in TRAIN.items() if name != "engine"},
        "candidate": {"shards": 4, "dispatch": "ring"},
    }
    job = read_job(record, ENGINES)
    assert job.candidate == {"shards": 4}
    assert (job.work.engine, job.work.settings) == ("acme", {"dispatch": "ring"})


def test_an_unknown_engine_does_not_hide_other_errors() -> None:
    tuner = {"space": {"nope": 1}, "control": {"max_trials": "many"}}
    sections = {"model": {**SHAPE, "hidden_size": 63}, "auto_tuner": tuner, "envs": {"1": "x"}}
    error = error_of(engine="acmee", seq_length="x", sections=sections)
    assert {(each.key, each.value) for each in error.problems} == {
        ("train.engine", "acmee"),
        ("train.seq_length", "x"),
        ("model.hidden_size", 63),
        ("auto_tuner.control.max_trials", "many"),
        ("envs['1']", None),
    }


def test_the_schema_accepts_words_as_one_text_as_the_spec_does() -> None:
    texts = json_schema(ENGINES)["$defs"]["Settings_acme"]["properties"]["parts"]["anyOf"]
    (pattern,) = [each["pattern"] for each in texts if "pattern" in each]
    for text in ("moe", "attn,moe", "attn moe"):
        assert re.search(pattern, text)
        assert parse(settings={"parts": text}).train.settings["parts"] == ",".join(sorted(re.findall(r"\w+", text)))
    assert not re.search(pattern, "mlp")
    assert error_of(settings={"parts": "mlp"}).key.startswith("train.settings.parts")


@pytest.mark.parametrize(
    ("nodes", "batch", "wrong"), [(2, 8, False), (4, 8, False), (3, 8, True), (1, 6, True), (8, 8, True)]
)
def test_nodes_of_trials_divide_the_nodes_and_the_batch(nodes: int, batch: int, wrong: bool) -> None:
    cluster = {"chip": "a", "nodes": 4, "devices_per_node": 2}
    sections = {"cluster": cluster, "auto_tuner": {"control": {"trial_nodes": nodes}}}
    if wrong:
        assert error_of(global_batch_size=batch, sections=sections).key == "auto_tuner.control.trial_nodes"
    else:
        assert parse(global_batch_size=batch, sections=sections).trial_nodes <= 4


def test_a_job_may_have_more_nodes_than_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    tuner = {"launcher": "ssh", "control": {"trial_nodes": 2}}
    sections = {"cluster": {"chip": "a", "nodes": 8, "hostfile": "hosts"}, "auto_tuner": tuner}
    spec = parse(sections=sections, base=tmp_path)
    assert (spec.cluster.nodes, spec.cluster.hosts, spec.on_nodes(2).train.global_batch_size) == (8, ("a", "b"), 2)
    sections["auto_tuner"] = {"control": {"trial_nodes": 4}}
    assert error_of(sections=sections, base=tmp_path).key == "auto_tuner.control.trial_nodes"
