"""A key that no table knows is named by each importer, whatever its value and section. Each form gives typed starts;
what people have comes in whole, or is refused with the cause."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_importers.command import read_command
from flagcore_importers.starts import FailedScript, Reader

from extras.importers.tests.test_import_command import FOUND_INPUTS, TRAINING
from extras.importers.tests.test_import_command import UNKNOWN_KEYS as CASES
from flagcore import api
from flagcore.api.inputs import open_spec
from flagcore.contracts import ImportedSpec
from flagcore.domain.launch import Start
from flagcore.errors import SpecError, UsageError
from flagcore.spec.plain_data import commented_yaml

VALUES = ("true", "false", "17", "null")
NAMES = ("turbo_mode", "zorblax", "quux_size", "flurb")


def nested(content: Mapping[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """The sections of a mapping with dotted keys."""
    for key, value in content.items():
        *sections, last = key.split(".")
        section = into
        for name in sections:
            section = section.setdefault(name, {})
        if isinstance(value, dict):
            nested(value, section.setdefault(last, {}))
        else:
            section[last] = value
    return into


def imported(case: Mapping[str, Any], given: Mapping[str, str], folder: Path) -> ImportedSpec:
    """The spec of a case, with further keys and their values."""
    is_toml, is_file = case["shape"].startswith("{} ="), bool(case.get("files"))
    written = [
        case["shape"].format(key.rpartition(".")[2] if is_toml else key, value if is_file else value.title())
        for key, value in given.items()
    ]
    for name, text in case.get("files", {}).items():
        content = text.replace("{}", (", " if name.endswith(".json") else "\n").join(written))
        if not is_toml:
            data = nested(yaml.safe_load(content), {})
            content = json.dumps(data) if name.endswith(".json") else yaml.safe_dump(data)
        (folder / name).write_text(content)
    for name in ("model.gguf", "train.py"):
        (folder / name).touch()
    if case["command"] == "bridge":
        return api.read_tree(folder, "own.yaml", importer="bridge")
    return read_command(None, [case["command"].replace("{}", " ".join(written))], chip="H100-SXM")


def named(case: Mapping[str, Any], given: Mapping[str, str], folder: Path) -> set[str]:
    """The keys that an import names, with underscores."""
    try:
        keys = [note.key for note in imported(case, given, folder).notes]
    except SpecError as error:  # unknown flags of servers are refused
        keys = [each.key for each in error.problems]
    return {name.strip(" -").replace("-", "_") for key in keys for name in key.split(",")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
def test_an_import_is_not_refused_by_its_own_plan(name: str, folder: Path) -> None:
    data = imported(CASES[name], {}, folder).data
    tuner = data.setdefault("auto_tuner", {})
    tuner["space"] = {key: value for key, value in tuner.get("baseline", {}).items() if value is not None}
    if str(data["model"]).endswith(".gguf"):
        data["model"] = "Qwen/Qwen3-0.6B"
    problem = open_spec(data, None, (), plan=True).problem
    assert len(problem.space)


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_no_table_knows_is_named(name: str, folder: Path) -> None:
    case = CASES[name]
    values = VALUES[:3] if case["shape"].startswith("{} =") else VALUES  # TOML has no null
    given = {
        pattern.format(NAMES[place % len(NAMES)]): values[place % len(values)]
        for place, pattern in enumerate(case["keys"])
    }
    keys = {f"{case.get('prefix', '')}{key.lstrip('+').replace('-', '_')}" for key in given}
    assert keys <= named(case, given, folder)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("verl", {"actor_rollout_ref.actor.fsdp_config.param_offload": "true"}),
        ("verl", {"actor_rollout_ref.ref.fsdp_config.param_offload": "true"}),
        ("verl", {"actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "false"}),
        ("verl", {"actor_rollout_ref.actor.optim.optimizer": "sgd"}),
        ("verl", {"reward_model.enable": "true"}),
        ("axolotl", {"s2_attention": "true"}),
        ("axolotl on DeepSpeed", {"torch_compile": "true", "fsdp_config.offload_params": "true"}),
        ("LLaMA-Factory", {"pure_bf16": "true"}),
        ("OpenRLHF", {"ds.zero_stage": "2"}),
    ],
)
def test_a_known_key_that_a_job_does_not_model_is_named(name: str, given: dict[str, str], folder: Path) -> None:
    assert given.keys() <= named(CASES[name], given, folder)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("verl", {"actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "true", "trainer.val_only": "false"}),
        ("verl", {"actor_rollout_ref.actor.optim.optimizer": "AdamW", "reward_model.enable": "false"}),
        ("axolotl", {"torch_compile": "true", "wandb_project": "own", "tf32": "true", "sage_attention": "false"}),
        ("LLaMA-Factory", {"overwrite_cache": "true", "use_galore": "false"}),
    ],
)
def test_a_key_that_is_modelled_harmless_or_off_is_not_named(name: str, given: dict[str, str], folder: Path) -> None:
    assert not given.keys() & named(CASES[name], given, folder)


def test_the_last_value_of_a_key_counts(folder: Path) -> None:
    words = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_batch_size=64"
    data = read_command(None, [f"{words} data.train_batch_size=32 +trainer.nnodes=2"], chip="H100-SXM").data
    assert (data["rl"]["prompts"], data["cluster"]["nodes"]) == (32, 2)
    removed = read_command(None, [f"{words} ~data.train_batch_size"], chip="H100-SXM").data
    assert removed["rl"]["prompts"] == 1024


POD = """
kind: Pod
spec:
  containers:
  - {image: some/server:1.2, args: [--model, m], envFrom: [{configMapRef: {name: sizes}}, {secretRef: {name: keys}}]}
"""
COMPOSE = """
services:
  server: {image: "some/server:${TAG}", command: [vllm, serve, "${MODEL}"], environment: {A: "1"}}
"""
UNIT = "[Service]\nEnvironment=SIZE=2\nExecStart=/opt/vllm serve m -tp $SIZE\n"
BATCH = "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=4\nvllm serve m --rank $SLURM_NODEID\n"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    return Reader(images={"vllm/server": ("vllm", "serve")}, directory=str(tmp_path))


def test_an_image_whose_entry_point_is_unknown_is_a_field(reader: Reader) -> None:
    (start,) = reader.programs(("docker", "run", "--gpus", "2", "some/server:1.2", "--model", "m"), None)
    assert start == Start(
        image="some/server:1.2", words=("--model", "m"), devices=2, left_out={"image": "some/server:1.2"}
    )
    (start,) = reader.programs(("docker", "run", "vllm/server:v0.11.0", "m"), None)
    assert start == Start(words=("vllm", "serve", "m"), version="0.11.0")


def test_objects_outside_of_a_manifest_are_absent(reader: Reader) -> None:
    (start,) = reader.programs((), POD)
    assert isinstance(start, Start)
    assert start.absent == ("ConfigMap sizes",)
    assert start.left_out["envFrom"] == "of a secret"


def test_variables_without_a_value_are_a_field(reader: Reader) -> None:
    (start,) = reader.programs((), COMPOSE)
    assert start == Start(words=("vllm", "serve", ""), envs={"A": "1"}, unset=("TAG", "MODEL"))
    (start,) = reader.programs((), "vllm serve $MODEL")
    assert start.unset == ("MODEL",)


def test_units_and_batch_jobs_have_their_variables(reader: Reader) -> None:
    (unit,) = reader.programs((), UNIT)
    assert unit == Start(words=("/opt/vllm", "serve", "m", "-tp", "2"), envs={"SIZE": "2"})
    (job,) = reader.programs((), BATCH)
    assert isinstance(job, Start)
    assert (job.words, job.hosts, job.devices) == (("vllm", "serve", "m", "--rank", "0"), 2, 4)
    assert job.job["SLURM_NNODES"] == "2"


def test_a_script_that_fails_is_no_program(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "xx_YY.UTF-8")  # bash warns of a locale that is not installed
    programs = [*reader.programs((), "vllm serve m\necho no data\nexit 3")]
    assert [type(each) for each in programs] == [Start, FailedScript]
    assert programs[1] == FailedScript(reason="ends with exit code 3: no data", unset=())


SECRETS = ("hf_abc", "sk-abc", "0123456789abcdef", "<secret>", "secrets.env", "hf-token-secret")
FLAGS = TRAINING.replace("--tokenizer-type HuggingFaceTokenizer --tokenizer-model model", "--vocab-size 32000")


@pytest.mark.parametrize("case", FOUND_INPUTS, ids=lambda case: str(case["name"]))
def test_an_input_comes_in_whole_or_is_refused(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    text = case["text"].replace("[TRAINING]", str(FLAGS.split())).replace("TRAINING", FLAGS)
    is_command = case["name"].endswith(".txt")
    for name, content in {**case.get("files", {}), **({} if is_command else {case["name"]: text})}.items():
        (tmp_path / name).write_text(content)
    before = sorted(os.listdir(tmp_path))
    if "error" in case:
        with pytest.raises(UsageError) as caught:
            read_command(None, [text if is_command else case["name"]], chip="H100-SXM")
        assert case["error"] in str(caught.value)
    else:
        imported = read_command(None, [text if is_command else case["name"]], chip="H100-SXM")
        data, written = imported.data, commented_yaml(imported)
        work = data.get("train") or data["serve"]
        cluster = data["cluster"]
        assert work["engine"] == case["engine"]
        assert work.get("engine_version") == case.get("version")
        assert data["model"] == case.get("model", data["model"])
        assert cluster.get("nodes", 1) == case.get("nodes", 1)
        assert cluster.get("devices_per_node", 1) == case.get("devices", 1)
        for name, found in (("baseline", data["auto_tuner"]["baseline"]), ("args", work.get("engine_args") or {})):
            assert found == case.get(name, found)
        noted = {note.key for note in imported.notes}
        assert {*case.get("notes", ())} <= noted
        assert not {*case.get("silent", ())} & noted
        if "serve" in data:  # what a note calls passed is passed
            passed = {note.at for note in imported.notes if note.text.startswith("is passed to the engine")}
            assert passed <= {f"serve.engine_args.{name}" for name in work.get("engine_args") or {}}
        envs = data.get("envs", {})
        assert envs == case.get("envs", envs)
        assert not [secret for secret in SECRETS if secret in written]
        assert case.get("contains", "") in written
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"services": {"vllm": {"image": "vllm/vllm-openai", "deploy": "fast"}}}, "services.vllm.deploy"),
        ({"kind": "Pod", "spec": {"containers": [{"image": "a", "env": [7]}]}}, "spec.containers[0].env[0]"),
        ({"kind": "Pod", "spec": {"containers": True}}, "spec.containers"),
        ({"decode": {"containers": [["vllm"]]}}, "decode.containers[0]"),
    ],
)
def test_a_value_of_another_type_in_a_manifest_is_named(content: object, key: str, tmp_path: Path) -> None:
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(content))

    with pytest.raises(SpecError) as error:
        read_command(None, [str(tmp_path / "given.yaml")], chip="H100-SXM")

    assert (error.value.file, error.value.key) == ("given.yaml", key)


def test_a_word_that_is_too_long_for_a_path_is_a_word_of_the_command() -> None:
    long = json.dumps({"pass_config": {f"switch_{number}": True for number in range(40)}})

    given = read_command(None, ["vllm", "serve", "Qwen/Qwen3-8B", "--compilation-config", long], chip="H100-SXM")

    assert "switch_39" in str(given.data)


@pytest.mark.parametrize(
    ("chip", "hosts"), [("H100-SXM", (1, 8)), ("GB200", (2, 4)), ("GB10", (8, 1)), ("910C", (1, 8))]
)
def test_a_server_spans_hosts_of_the_size_of_its_chip(chip: str, hosts: tuple[int, int]) -> None:
    cluster: Any = read_command(None, ["vllm", "serve", "Qwen/Qwen3-235B-A22B", "-tp", "8"], chip=chip).data["cluster"]

    assert (cluster.get("nodes", 1), cluster["devices_per_node"]) == hosts
