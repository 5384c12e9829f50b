"""Trees on several kinds of chips start on each host with the arguments and variables that FlagScale's runner gives."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from flagcore_flagscale import FlagScale
from flagcore_flagscale.source import Imported
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.space.knobs import SPACE_KNOBS

from extras.flagscale.tests.test_same_job import ANSWERS, DATA, TABLE, arguments, meaning, record, run_flagscale
from flagcore import api
from flagcore.contracts import ExportJob, Platform
from flagcore.domain.space import Candidate
from flagcore.errors import SpecError
from flagcore.plugins import load_plugins
from flagcore.spec.convert import parse_spec
from flagcore.tuner.stages.complete import complete_by_plugins
from flagcore.tuner.stages.launch import planned_launch, prepared_launch
from tests.checks import refuses
from tests.product import tasks

pytestmark = pytest.mark.spread

TWO = "n1 slots=8 type=A800\nn2 slots=16 type=BI-V150\n"
THREE = "n1 slots=8 type=BI-V150\nn2 slots=8 type=A800\nn3 slots=8 type=C550\n"
VOCABULARY = "++train.data.tokenizer.vocab_size=32000"
HETERO = "train.system.hetero"
TOKENIZER = "++train.data.tokenizer.tokenizer_path=/data/tokenizer"
OWN = ("~experiment.auto_tuner", f"{HETERO}.enable_hetero=true", TOKENIZER)
FIRST = (
    *OWN,
    f"{HETERO}.hetero_process_meshes=[2,1,1,4,1,4,1,1,2,2]",
    f"{HETERO}.hetero_pipeline_layer_split=[22,6,4]",
    f"{HETERO}.hetero_device_types=[A800,BI-V150]",
    f"{HETERO}.hetero_current_device_type=A800",
    "train.system.pipeline_model_parallel_size=3",
    "train.system.sequence_parallel=true",
    "~experiment.envs.device_type_specific",
    "++experiment.envs.device_type_specific={BI-V150: {IXCCL_DEBUG: WARN}, A800: {NCCL_DEBUG: WARN}}",
)
ROWS = {
    "granularity": "[[2,8,0],[1,8,1],[2,8,1]]",
    "method": "[[2,8,0],[1,8,0],[2,8,1]]",
    "num_layers": "[[2,8,1],[1,8,1],[2,8,3]]",
}
SECOND = (
    *OWN,
    f"{HETERO}.hetero_process_meshes=[2,1,1,2,2,2,1,1,4,1,2,1,1,2,2]",
    f"{HETERO}.hetero_pipeline_layer_split=[8,8,8,4,4]",
    f"{HETERO}.hetero_device_types=[A800,C550,BI-V150]",
    "train.system.pipeline_model_parallel_size=5",
    "train.system.sequence_parallel=true",
    "train.model.global_batch_size=32",
    "train.model.micro_batch_size=2",
    "~train.model.untie_embeddings_and_output_weights",
    f"++{HETERO}.use_partial_reduce_for_shared_embedding=true",
    *(f"++train.system.recompute.recompute_{name}_per_stage_micro_batch={rows}" for name, rows in ROWS.items()),
    "~experiment.envs.device_type_specific",
    "++experiment.envs.device_type_specific={C550: {MCCL_DEBUG: INFO, LD_PRELOAD: /opt/maca/lib/libmccl.so}}",
    "++experiment.envs.node_specific={n2: {NCCL_IB_HCA: mlx5_2}, n3: {MCCL_DEBUG: WARN, MCCL_IB_HCA: mlx5_0}}",
)
THIRD = (
    *OWN,
    f"{HETERO}.hetero_process_meshes=[1,2,4,4,1,1,2,8,8,1]",
    f"{HETERO}.hetero_pipeline_layer_split=[20,12]",
    f"{HETERO}.hetero_device_types=[A800,BI-V150]",
    f"++{HETERO}.expert_tensor_parallel_size_per_process_mesh=[1,1]",
    "train.model.micro_batch_size=2",
    "++train.model.num_experts=8",
    "++train.model.moe_router_topk=2",
    "++train.model.moe_ffn_hidden_size=1024",
    "~train.system.recompute",
)
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "llama3/train_hetero": ("wheel", "n1 slots=8 type=A800\nn2 slots=8 type=A100\n", DATA),
    "aquila/train_hetero": ("wheel", "", (*DATA, VOCABULARY, "++train.data.tokenizer.tokenizer_type=NullTokenizer")),
    "aquila/hetero_auto_tuner": (
        "wheel",
        "n1 slots=2 type=A800\nn2 slots=2 type=mlu590\n",
        (*DATA, VOCABULARY, "~experiment.auto_tuner", "experiment.runner.nproc_per_node=2"),
    ),
    "deepseek_v3/train_hetero": ("wheel", "", (*DATA, VOCABULARY)),
    "first": ("train_hetero", TWO, FIRST),
    "second": ("train_hetero", THREE, SECOND),
    "third": ("train_hetero", TWO, THIRD),
}
"""Trees of FlagScale's wheel and of this repository, with a host file."""


def case(name: str, folder: Path, wheel: Path) -> dict[str, Any]:
    tree, hosts, overrides = CASES[name]
    file = folder / "of_test.txt"
    file.write_text(hosts)
    count = hosts.count("\n")
    where = [f"++experiment.runner.hostfile={file if hosts else 'null'}", f"++experiment.runner.nnodes={count or 1}"]
    if name in ("first", "second", "third"):
        where += ["++experiment.runner.nproc_per_node=null", "~experiment.envs.CUDA_VISIBLE_DEVICES"]
        where.append("++experiment.envs.SOME_VISIBLE_DEVICES='0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15'")
    directory, top = folder / tree, "tune"
    if tree == "wheel":
        directory, top = wheel / "examples" / name.split("/")[0] / "conf", name.split("/")[1]
    where.append("++experiment.exp_dir=/tmp/flagcore-tests/exp")
    return {"directory": str(directory), "name": top, "overrides": [*overrides, *where]}


def read(asked: dict[str, Any]) -> tuple[Imported, Platform, Candidate]:
    found = api.read_tree(Path(asked["directory"]), asked["name"], asked["overrides"])
    spec = parse_spec(found.data, file="x", base=Path(), engines=tasks.ENGINES)
    values = {knob.name: knob.neutral for knob in SPACE_KNOBS} | dict(spec.baseline or {})
    return found, complete_by_plugins(spec, load_plugins(()), ENGINE), Candidate.of(values)


def normal(words: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """Return the meaning of a command's arguments, with the values of each stage and micro-batch."""
    values = meaning(TABLE, arguments(words))
    for name in [name for name in values if name.endswith("_per_stage_micro_batch")]:
        rows = [json.loads(row) for row in values[name]]
        stages = [sum(([each] * count for count, each in zip(row[1::2], row[2::2], strict=True)), []) for row in rows]  # noqa: RUF017
        values[name] = [stage for row, stage in zip(rows, stages, strict=True) for _ in range(row[0])]
    off = "recompute_granularity_per_stage_micro_batch"
    if off in values:  # nothing is recomputed there, so that the number of layers is not read
        for name in ("method", "num_layers"):
            key = f"recompute_{name}_per_stage_micro_batch"
            values[key] = [s if any(g) else [] for s, g in zip(values[key], values[off], strict=True)]
    return values


def check(asked: dict[str, Any], answers: list[dict[str, Any]], folder: Path) -> None:
    _, platform, candidate = read(asked)
    for_real = ENGINE.launch(platform, candidate, str(folder), for_real=True)
    trial = prepared_launch(platform, planned_launch(platform, candidate, str(folder)))
    assert answers
    for answer in answers:
        words = [word.replace("{type}", _kind(answer)) for word in for_real.argv]
        assert normal(words) == normal(answer["words"])
        own = trial.on_host.get(answer["host"], trial)
        if trial.on_host:
            count = answer["words"][answer["words"].index("--nproc_per_node") + 1]
            assert f"--nproc-per-node={count}" in own.argv
            assert own.argv[own.argv.index("--hetero-current-device-type") + 1] == _kind(answer)
        expected = {name: value for name, value in answer["envs"].items() if name != "PYTHONPATH"}
        assert expected.items() <= own.environment.items()


def _kind(answer: dict[str, Any]) -> str:
    words = answer["words"]
    return str(words[words.index("--hetero-current-device-type") + 1])


WHEEL = Path(os.environ.get("FLAGSCALE", "/flagscale"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (tree, _, _) in CASES.items() if tree != "wheel"])
def test_a_mixed_job_has_the_arguments_that_flagscale_recorded(name: str, tmp_path: Path) -> None:
    (run := tmp_path / "run" / "trials" / "0001").mkdir(parents=True)
    check(case(name, tmp_path, WHEEL), ANSWERS[name], run)


@pytest.mark.long
@pytest.mark.skipif("FLAGSCALE" not in os.environ, reason="needs FLAGSCALE, the folder flag_scale of FlagScale's wheel")
def test_a_mixed_job_has_the_arguments_of_flagscales_own_runner(tmp_path: Path) -> None:
    (run := tmp_path / "run" / "trials" / "0001").mkdir(parents=True)
    cases: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(CASES):
        (own := tmp_path / str(number)).mkdir()
        (own / "train_hetero").symlink_to(tmp_path / "train_hetero")
        cases[name] = case(name, own, WHEEL)
    answers = dict(zip(cases, run_flagscale(sys.executable, WHEEL, list(cases.values())), strict=True))
    if os.environ.get("RECORD"):
        own_answers = {name: each for name, each in answers.items() if CASES[name][0] != "wheel"}
        record(json.loads(json.dumps(own_answers).replace(str(tmp_path), "/trees")))
    for name, answer in answers.items():
        check(cases[name], answer, run)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("hetero_mode", "pp", "hetero_pipeline_layer_split"),
        ("process_meshes", "[4,1,1,2,1,2]", "hetero_process_meshes"),
        ("hetero_pipeline_stages", "[2,4]", "hetero_process_meshes"),
        ("hetero_mode", "dp", "layers instead of data"),
    ],
)
def test_keys_of_old_releases_are_refused_with_those_of_today(key: str, value: str, fix: str) -> None:
    with pytest.raises(SpecError) as caught:
        api.read_tree(Path("train_hetero"), "tune", [f"++train.system.{key}={value}"])
    assert caught.value.key.rpartition(".")[2] == key
    assert fix in caught.value.fix


def test_a_host_file_with_more_slots_than_visible_devices_is_refused(tmp_path: Path) -> None:
    asked = case("first", tmp_path, WHEEL)
    envs = "++experiment.envs={node_specific: {n2: {IX_VISIBLE_DEVICES: '0,1'}}}"
    with pytest.raises(SpecError, match="2 of 16 slots of n2"):
        api.read_tree(Path(asked["directory"]), "tune", [*asked["overrides"], "~experiment.envs", envs])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{HETERO}.hetero_process_meshes", "[2,1,1,4]"),
        (f"{HETERO}.hetero_process_meshes", "null"),
        (f"{HETERO}.hetero_device_types", "[A800]"),
        (f"{HETERO}.hetero_pipeline_layer_split", "[20,8,5]"),
        (f"{HETERO}.standalone_embedding_stage", "true"),
        ("train.system.pipeline_model_parallel_size", "null"),
    ],
)
def test_meshes_that_flagscale_refuses_are_refused_where_it_reads_them(key: str, value: str, tmp_path: Path) -> None:
    asked = case("first", tmp_path, WHEEL)
    with refuses(key):
        api.read_tree(Path(asked["directory"]), "tune", [*asked["overrides"], f"{key}={value}"])


def tuned(folder: Path, *overrides: str, without: str = "~experiment.auto_tuner") -> dict[str, Any]:
    """Return the spec of the first tree with its tuner, and without all overrides that contain a text."""
    asked = case("first", folder, WHEEL)
    kept = [each for each in asked["overrides"] if each != "~experiment.auto_tuner" and without not in each]
    return api.read_tree(Path(asked["directory"]), "tune", [*kept, *overrides]).data


SPACE = "experiment.auto_tuner.space.hetero_process_meshes"


def test_a_tuners_space_lists_meshes_and_derives_layers(tmp_path: Path) -> None:
    data = tuned(tmp_path, f"{SPACE}=[[2,4],1,1,auto,1,auto,1,1,4,2]")
    meshes = [f"A800 {sizes} + BI-V150 tp2 dp4 pp2" for sizes in ("tp2 dp4", "tp4 dp2")]
    assert data["auto_tuner"]["space"]["meshes"] == meshes
    assert "pipeline_model_parallel_layout" not in data["train"].get("settings", {})
    assert data["cluster"]["groups"][1] == {"chip": "BI-V150", "envs": {"IXCCL_DEBUG": "WARN"}}


def test_the_baseline_of_equal_meshes_in_a_tuner_has_derived_layers(tmp_path: Path) -> None:
    equal = [f"{HETERO}.hetero_process_meshes=[2,1,1,4,1,2,1,1,4,2]", f"{HETERO}.hetero_pipeline_layer_split=[20,6,6]"]
    baseline = tuned(tmp_path, *equal)["auto_tuner"]["baseline"]
    assert (baseline["layer_split"], baseline["pipeline_model_parallel_size"]) == ("balanced", 3)


def test_a_tuners_space_has_meshes_on_all_devices_of_the_host_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(CASES, "first", ("train_hetero", "n1 slots=16 type=A800\nn2 slots=4 type=BI-V150\n", FIRST))
    envs = ["~experiment.envs", f"{HETERO}.hetero_pipeline_layer_split=null"]
    data = tuned(tmp_path, *envs, f"{SPACE}=[8,1,1,auto,1,4,1,1,auto,1]", without="VISIBLE")
    assert data["auto_tuner"]["space"]["meshes"] == ["A800 tp8 dp2 + BI-V150 tp4"]


@pytest.mark.slow
def test_an_exported_tree_is_imported_as_the_same_job(tmp_path: Path) -> None:
    _, platform, candidate = read(case("second", tmp_path, WHEEL))
    launch = prepared_launch(platform, planned_launch(platform, candidate, str(tmp_path), for_real=True))
    exporter: Any = FlagScale()
    job = ExportJob(name="job", comments=(), platform=platform, candidate=candidate, launch=launch, devices=8)
    for name, text in exporter.export(job, "flagscale").items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(text)
    hosts = f"++experiment.runner.hostfile={tmp_path / 'of_test.txt'}"
    again = {"directory": str(tmp_path / "out"), "name": "train", "overrides": [hosts]}
    _, platform_again, candidate_again = read(again)
    assert candidate_again == candidate
    launch_again = ENGINE.launch(platform_again, candidate_again, str(tmp_path), for_real=True)
    assert normal(launch_again.argv) == normal(launch.argv)
    found, given = (
        [{**setup.environment, **setup.envs} for setup in each.setups] for each in (platform_again, platform)
    )
    for setup, own, again in zip(platform.setups, given, found, strict=True):
        shown = again.pop(setup.support.visible_devices[0])  # FlagScale's runner needs it
        assert shown == ",".join(map(str, range(setup.devices)))
        assert own == again
    assert platform_again.task.spec.cluster.host_envs == platform.task.spec.cluster.host_envs != {}


def test_meshes_that_do_not_use_all_devices_of_a_type_are_no_baseline(tmp_path: Path, monkeypatch: Any) -> None:
    extra = ("experiment.runner.hostfile=null", "++experiment.runner.nnodes=4", "++experiment.runner.nproc_per_node=16")
    data = tuned(tmp_path, *extra, without="hostfile")
    assert "baseline" not in data["auto_tuner"]
    assert [group["nodes"] * group["devices_per_node"] for group in data["cluster"]["groups"]] == [32, 32]
    monkeypatch.setitem(CASES, "first", ("train_hetero", TWO.replace("16", "8"), FIRST))
    assert "baseline" not in tuned(tmp_path)["auto_tuner"]
