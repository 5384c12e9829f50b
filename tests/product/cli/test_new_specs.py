"""`flag init`, `flag import ENGINE` and `flag export`: from what people have to files, on the command line. A cluster
of several node groups: planned, and refused where it would have to run."""

import json
import os
import pty
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore import api
from flagcore.api.inputs import fixed_task, open_spec
from flagcore.errors import NothingFits, UsageError
from flagcore.report.estimate import ChipPlan, Mixing, mixing_text, verdict
from tests.checks import given
from tests.product.cli.conftest import FLAG, Answer, Flag, Project

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
}


ONE = {
    "model": "model",
    "cluster": {"chip": "H100-SXM", "nodes": 1, "devices_per_node": 2},
    "train": {"engine": "megatron", "seq_length": 512, "global_batch_size": 8, "precision": "bf16"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.costly
def test_the_commands_that_a_size_prints_start_with_what_all_candidates_keep_of_the_baseline(flag: Flag) -> None:
    baseline = {"tensor_model_parallel_size": 2, "context_len": 2048}
    words = ["--model", "model", "--engine", "vllm", "--chip", "H100-SXM", "--devices", "1", "--ttft-p99", "5s"]
    words += ["--tpot-p99", "1.5ms", "--set", f"auto_tuner.baseline={json.dumps(baseline)}"]
    found = flag("size", *words, "--rate", "5")
    assert "context_len 2048" in found.out
    assert re.search(r"Nearest limit: p99 TPOT [\d.]+ s, \d+% of 0.0015 s", found.out)
    exported, tuned = (
        shlex.split(found.err.partition(each)[2].splitlines()[0]) for each in ("flag export ", "flag tune ")
    )
    assert [each for each in exported if "devices" in each] == ["--devices"]
    flag("export", *exported, "-o", "out").worked()
    (file,) = Path("out").iterdir()
    assert "Deployment" in {each["kind"] for each in yaml.safe_load_all(file.read_text())}
    assert "--max-model-len 2048" in file.read_text()
    flag("tune", *tuned, "--fidelity", "estimate").worked()
    run = json.loads(Path("runs/replica/result.json").read_text())
    assert run["best"]["candidate"]["context_len"] == 2048


FSDP2 = ("--model", "model", "--engine", "fsdp2", "--chip", "H20", "--devices", "1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("import", "empty"), "empty is empty"),
        (("import", "model"), "model is a folder"),
        (("import", "nothing"), "neither a file nor a command"),
        (("size", "--model", "model", "--rate", "2/s", "--to", "hpa", "--format", "json"), "--format json"),
        (("size", "--model", "model", "--rate", "auto"), "--rate auto"),
        (("size", "--run", "model", "--rate", "2", "--tpot-p99", "1s"), "--tpot-p99"),
        (("size", "--run", "model", "--rate", "2", "--set", "cluster.nodes=2"), "--set"),
        (("import", "run.sh", "-o", "run.sh", "--force"), "run.sh is an input"),
        (("estimate", "spec.yaml", "--report", "../{folder}/spec.yaml"), "spec.yaml is an input"),
        (("estimate", "spec.yaml", "--set", "cluster.nodes=1e30"), "cluster.nodes"),
        (("estimate", "--model", "model", "--chip", "H20", "--devices", "100000"), "--devices"),
        (("estimate", "--model", "model", "--chip", "H20", "--ttft-p99", "1"), "--ttft-p99 1"),
        (("export", "spec.yaml", "--to", "slrm"), "kubernetes"),
        (("export", *FSDP2, "--to", "foo"), "targets that accept this: none; train.engine"),
        (("export", "spec.yaml"), "--to is missing; targets that accept this: megatron, "),
        (("export", *FSDP2, "--to", "fsdp2"), "train.engine"),
        (("import", "deepspeed train.py --deepspeed no.json"), "--deepspeed = "),
        (("run", "spec.yaml", "--chip", "H20"), "is a spec or a run"),
        (("run", "model", "--chip", "H21"), "did you mean H20"),
        (("run", "model", "--engine", "megatron"), "--engine megatron"),
        (("init", "--model", "nowhere", "--engine", "vllm"), "nowhere"),
        (("init", "--model", "model", "--engine", "none"), "none"),
        (("init", "--model", "model", "--engine", "vllm", "--seq-length", "8"), "--seq-length"),
        (("init", "--model", "model", "--engine", "vllm", "--chip", "H2000"), "H200"),
        (("import", "vllm"), "vllm"),
        (("import", "vllm", "llama-server -m x"), "llama-server"),
        (("import", "vllm", "vllm serve ./model", "--chip", "H2000"), "H200"),
        (("import", "none", "x"), "none"),
        (("estimate", "odd.yaml", "--chip", "H20"), "cluster"),
    ],
    ids=lambda each: each[:5] if isinstance(each, tuple) else "",
)
def test_a_mistake_is_named_and_changes_nothing(flag: Flag, folder: Path, words: Sequence[str], named: str) -> None:
    (folder / "empty").touch()
    (folder / "run.sh").write_text("vllm serve model\n")
    (folder / "odd.yaml").write_text("cluster: 1\nenvs: [A=1]\n")
    (folder / "spec.yaml").write_text(yaml.safe_dump(ONE))
    before = {each: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    answer = flag(*(each.format(folder=folder.name) for each in words))
    assert (answer.code, named in answer.err, len(answer.err.strip().splitlines()) <= 6) == (2, True, True), answer.err
    assert before == {each: each.read_bytes() for each in folder.iterdir() if each.is_file()}


@pytest.mark.costly
@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_a_new_spec_is_estimated_and_exported(flag: Flag, engine: str, tmp_path: Path) -> None:
    argv = ("init", "--model", "model", "--engine", engine, "--chip", "H100-SXM", "-o", "spec.yaml")
    flag(*argv).worked()
    assert flag(*argv).code == 2  # the file exists
    assert flag(*argv, "--force").code == 0
    written = yaml.safe_load((tmp_path / "spec.yaml").read_text())
    assert written.get("train", {"precision": "auto"})["precision"] == "auto"  # bf16 has no units on some chips
    flag("estimate", "spec.yaml", "--top", "1", "--json").worked()
    exported = flag("export", "spec.yaml", "--to", engine).worked()
    assert (tmp_path / exported.out.splitlines()[-1]).is_file()


@pytest.mark.costly
def test_missing_values_are_asked_for_on_a_terminal_only(flag: Flag, tmp_path: Path) -> None:
    assert flag("init", "--engine", "vllm").code == 2
    main, other = pty.openpty()
    process = subprocess.Popen([*FLAG, "init", "--engine", "vllm"], stdin=other, stdout=subprocess.PIPE)
    os.write(main, b"nowhere\nmodel\nH1OO\nH100\n\n0\n4\n\n64\nmany\n\n0.3\np99 ttft\np99 ttft 600ms\n")
    text, _ = process.communicate(timeout=30)
    os.close(main)
    os.close(other)
    data = yaml.safe_load(text)
    assert data["cluster"] == {"chip": "H100", "nodes": 1, "devices_per_node": 4}
    assert data["serve"]["profile"] == {"input_len": 1024, "output_len": 64, "concurrency": 16, "range_spread": 0.3}
    assert data["serve"]["slo"] == {"ttft_s": {"p99": 0.6}}


def test_an_imported_command_is_printed_with_its_notes_on_stderr(flag: Flag, tmp_path: Path) -> None:
    completed = flag(
        "import", "vllm", "--chip", "H100-SXM", "--", *["vllm", "serve", "model", "--tp", "2", "--port", "9"]
    ).worked()
    assert yaml.safe_load(completed.out)["auto_tuner"]["baseline"]["tensor_model_parallel_size"] == 2
    assert "--port" in completed.err


def test_what_is_left_out_of_a_script_keeps_the_secrets_of_its_program(flag: Flag, tmp_path: Path) -> None:
    secret = "k3y-of-the-certificate"
    script = f"openssl rsa -passin pass:{secret} -in a\nsmbclient -U me%{secret} //h/s\nvllm serve Qwen/Qwen3-8B\n"
    (tmp_path / "start.sh").write_text(script)
    completed = flag("import", "start.sh").worked()
    assert secret not in completed.out + completed.err
    assert "openssl: is left out: rsa -passin pass:(left out) -in a" in completed.err


@pytest.mark.costly
def test_a_public_model_is_planned_without_a_file(flag: Flag, answer: Answer) -> None:
    options = ("--model", "Qwen/Qwen3-8B", "--chip", "H100", "--devices", "2", "--top", "1")
    assert "max_num_seqs" in answer("estimate", *options)[0]["candidate"]
    (training,) = answer("estimate", *options, "--engine", "megatron", "--set", "train.global_batch_size=8")
    assert "micro_batch_size" in training["candidate"]
    for wrong in (("spec.yaml",), ("--jobs", "-")):
        assert flag("estimate", *options[:4], *wrong).code == 2
    assert "Qwen/Qwen3-8B" in flag("estimate", "--model", "Qwen/Qwen3-8", "--chip", "H100").err


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_training_without_a_file_has_a_precision_that_the_chip_has_and_others_are_refused(engine: str) -> None:
    expected = {"V100-32GB": ("fp16", {"bf16", "fp8"}), "T4": ("fp16", {"bf16", "fp8"})}
    expected |= {"A100-80GB": ("bf16", {"fp8"}), "H100-SXM": ("bf16", {"nvfp4"}), "C550": ("bf16", {"fp8"})}
    for chip, (precision, refused) in expected.items():
        spec = api.spec_of_model("Qwen/Qwen3-0.6B", engine=engine, chip=chip, devices=8)
        assert open_spec(spec, None, (), plan=True).problem.task.spec.work.precision == precision
        for name in refused:
            with pytest.raises(NothingFits, match=f"precision = {name}"):
                open_spec(api.changed_spec(spec, {"train.precision": name}), None, (), plan=True)


def test_exports_of_models_have_their_names(flag: Flag) -> None:
    options = ("--chip", "H100", "--devices", "1", "--engine", "vllm", "--to", "slurm", "-o", "-")
    assert "--job-name=qwen2-5-7b\n" in flag("export", "--model", "Qwen/Qwen2.5-7B", *options).worked().out
    few = ("--chip", "RTX4090", "--devices", "1", "--engine", "vllm", "--to", "vllm")
    flag("export", "--model", "Qwen/Qwen3-32B", *few).refused(3, "lowest memory use")


@pytest.mark.parametrize(
    ("limit", "bounds"),
    [
        ("p99 ttft 1s", {"ttft_s": {"p99": 1.0}}),
        ("tpot_s.mean", None),
        ("TTFT<600ms, p50 tpot 0.05 s", {"ttft_s": {"p99": 0.6}, "tpot_s": {"p50": 0.05}}),
        ("TTFT<600ms,p50 tpot=50ms", {"ttft_s": {"p99": 0.6}, "tpot_s": {"p50": 0.05}}),
        ("p99 1s", None),
    ],
)
def test_latency_limits_are_written_as_they_are_said(limit: str, bounds: dict[str, Any] | None) -> None:
    spec = api.spec_of_model("Qwen/Qwen3-8B", chip="H100", devices=1)
    if bounds is None:
        with pytest.raises(UsageError, match=r"--slo .*p99.*ttft"):
            api.with_limits(spec, [limit])
    else:
        assert api.with_limits(spec, [limit]).data["serve"]["slo"] == bounds


@pytest.mark.parametrize(
    ("options", "clients"), [(("--tensor-parallel-size", "4"), 64), (("--data-parallel-size", "16"), 256), ((), 16)]
)
def test_the_clients_of_an_imported_command_grow_with_its_devices(
    flag: Flag, options: tuple[str, ...], clients: int
) -> None:
    made = yaml.safe_load(flag("import", "--", "vllm", "serve", "Qwen/Qwen3-30B-A3B", *options).out)
    assert made["serve"]["profile"]["concurrency"] == clients
    named = {"chip": "H100", "devices": clients // 16}
    serve = api.spec_of_model("Qwen/Qwen3-8B-GGUF", **named).data["serve"]
    assert (serve["engine"], serve["profile"]["concurrency"]) == ("llamacpp", clients)


def test_public_models_are_listed_by_words_and_start_a_spec(flag: Flag) -> None:
    [model] = json.loads(flag("models", "deepseek", "V3.2", "--json").out)
    expected = {"layers": 61, "hidden": 7168, "experts": 256, "context": 163840, "weights": "fp8"}
    assert model == {"model": "deepseek-ai/DeepSeek-V3.2", **expected}
    assert {each["weights"] for each in json.loads(flag("models", "gpt-oss", "--json").out)} == {"mxfp4"}
    assert flag("models", "no such model", "--json").out.strip() == "[]"
    assert "Qwen/Qwen3-32B" in flag("models", "qwen3-33b").err
    made = flag("init", "--model", "Qwen/Qwen3-8B", "--engine", "vllm", "--chip", "H100")
    assert yaml.safe_load(made.out)["model"] == "Qwen/Qwen3-8B"


LARGE = {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "2GiB", "nic_bytes_per_second": 1.0e9}
SMALL = {**LARGE, "memory_per_device": "400MiB"}
FEW = {"space": {"micro_batch_size": [1], "use_recompute": [False], "num_layers_per_virtual_pipeline_stage": [None]}}
NEW, OLD = {**LARGE, "name": "new"}, {**LARGE, "name": "old", "speed": 0.25}


@pytest.fixture
def spec(project: Project) -> Callable[..., str]:
    """Write the project's spec with node groups, and without its command unless requested."""

    def write(*groups: dict[str, Any], command: bool = False, **sections: Any) -> str:
        path = Path(project.spec(**sections))
        data = yaml.safe_load(path.read_text()) | {"cluster": {"groups": list(groups)}}
        if not command:
            del data["train"]["command"]
        path.write_text(yaml.safe_dump(data))
        return str(path)

    return write


@pytest.fixture
def mixing(spec: Callable[..., str]) -> Callable[..., Mixing]:
    """Return the comparison of a mixed plan with each kind alone."""

    def compared(*groups: dict[str, Any], **sections: Any) -> Mixing:
        return given(api.estimate(spec(*groups, **sections)).mixing)

    return compared


def test_a_run_belongs_to_the_layout_of_all_its_groups(spec: Callable[..., str]) -> None:
    def hardware(second: dict[str, Any]) -> object:
        file = spec(LARGE, second, auto_tuner={"space": {"tensor_model_parallel_size": [1]}})
        return fixed_task({}, open_spec(file, None, (), plan=True).problem)["hardware"]

    assert hardware(LARGE) == hardware(SMALL)  # memory may change
    assert hardware(LARGE) != hardware({**LARGE, "nodes": 2, "devices_per_node": 1})


@pytest.mark.costly
def test_candidates_of_a_mixed_cluster_are_listed_with_all_its_chips(flag: Flag, spec: Callable[..., str]) -> None:
    listing = flag("estimate", spec(LARGE, SMALL, auto_tuner=FEW))
    assert "on 2 x cpu + 2 x cpu:" in listing.err
    assert "illegal: stages_in_one_group" in listing.err
    result = json.loads(flag("estimate", spec(LARGE, SMALL, auto_tuner=FEW), "--json").out)
    plain = [each["candidate"] for each in result if not each["candidate"]["meshes"]]
    assert {each["pipeline_model_parallel_size"] % 2 for each in plain} == {0}
    assert all(each["mfu"] > 0 for each in result)


def test_a_plan_of_one_kind_is_not_called_mixed(flag: Flag, spec: Callable[..., str]) -> None:
    unknown = {**LARGE, "nic_bytes_per_second": None}  # without a network, only plans of one kind have a time
    completed = flag("estimate", spec(unknown, LARGE))
    assert "sum of single chips" not in completed.out
    assert "the network between node groups (give nic_bytes_per_second in each of cluster.groups)" in completed.err


@pytest.mark.costly
def test_the_capacity_reported_comes_from_the_stage_with_the_least_free_memory(
    flag: Flag, spec: Callable[..., str]
) -> None:
    def memory(*groups: dict[str, Any]) -> dict[str, Any]:
        file = spec(*groups, auto_tuner=FEW)
        output = json.loads(flag("estimate", file, "--explain", "baseline", "--json").out)
        found: dict[str, Any] = output["memory"]
        return found

    last, first = memory(LARGE, SMALL), memory(SMALL, LARGE)
    assert last["worst_stage"] > 0 == first["worst_stage"]
    assert last["capacity_gib"] == first["capacity_gib"] == pytest.approx(400 / 1024)


@pytest.mark.parametrize(
    ("arguments", "command", "space", "named"),
    [
        (("tune",), False, {}, ("cluster.groups", "flag estimate", "train.command")),
        (("tune",), True, {"meshes": ["cpu#1 dp2 + cpu#2 dp2"]}, ("auto_tuner.space.meshes",)),
        (("estimate", "--chip", "cpu"), False, {}, ("cluster.groups",)),
    ],
)
def test_what_a_mixed_cluster_cannot_do_is_refused(
    flag: Flag, spec: Callable[..., str], arguments: tuple[str, ...], command: bool, space: Any, named: tuple[str, ...]
) -> None:
    file = spec(LARGE, SMALL, command=command, **({"auto_tuner": {"space": space}} if space else {}))
    flag(*arguments, file).refused(2, *named)


@pytest.mark.costly
def test_a_mixed_plan_has_the_layers_of_all_vendors_or_names_those_of_each(
    flag: Flag, spec: Callable[..., str], mixing: Callable[..., Mixing]
) -> None:
    def groups(*chips: str) -> list[dict[str, Any]]:
        return [{"chip": chip, "nodes": 1, "devices_per_node": 2, "nic_bytes_per_second": 1e10} for chip in chips]

    for chips in (("A100-80GB", "H200"), ("H100-SXM", "C550")):
        found = mixing(*groups(*chips), auto_tuner=FEW)
        assert [(each.split, each.last) for each in (found.mixed, *found.others)] == [
            ("layer split", ""),
            ("data split", "no program starts it"),
        ]
    assert "layer split*" in mixing_text(found, {}, found.mixed.candidate)
    assert {each.implementation for each in (*found.alone, found.mixed)} == {"transformer_engine"}
    found = mixing(*groups("H100-SXM", "cpu"), auto_tuner=FEW)
    assert {each.implementation for each in found.alone} != {found.mixed.implementation}
    assert "train.implementation" in flag("estimate", spec(*groups("H100-SXM", "cpu"), auto_tuner=FEW)).out


@pytest.mark.costly
def test_an_estimate_compares_splits_of_layers_and_of_data_with_each_kind_alone(
    flag: Flag, spec: Callable[..., str], mixing: Callable[..., Mixing]
) -> None:
    found = mixing(LARGE, LARGE, auto_tuner=FEW)
    assert [each.devices for each in (found.mixed, *found.alone)] == [4, 2, 2]
    assert found.best_alone
    assert found.sum_alone == pytest.approx(2 * found.best_alone.tokens_per_second)
    assert found.idle.keys() == {"cpu#1", "cpu#2"}
    plans = [found.mixed, *found.others]
    assert [(each.split, bool(each.last)) for each in plans] == [("layer split", False), ("data split", True)]
    for each in plans:
        assert ("|" in (each.candidate["meshes"] or "")) == (each.split == "data split")
    table = flag("estimate", spec(LARGE, LARGE, auto_tuner=FEW)).out
    assert all(text in table for text in ("layer split", "data split", "sum of single chips"))
    assert "train.implementation differs" not in table
    only = mixing(LARGE, LARGE, auto_tuner={"space": {"meshes": ["cpu#1 dp2 | cpu#2 dp2"]}})
    assert [(each.split, bool(each.last)) for each in only.others] == [("data split", True)]
    assert all(0 <= share < 1 for share in only.idle.values())


@pytest.mark.costly
def test_a_slower_group_has_fewer_layers_and_is_named(spec: Callable[..., str]) -> None:
    plan = api.estimate(spec(NEW, OLD), top=100)
    assert any((each["candidate"]["meshes"] or "").startswith("new") for each in plan.candidates)
    found = given(plan.mixing)
    assert found.kinds == ("new", "old")
    chips = [chip for stages in found.stages for chip, _ in stages]
    assert all(sum(layers for _, layers in stages) > 1 for stages in found.stages)
    assert set(chips) == {"new", "old"}
    text = mixing_text(found, {}, {})
    assert all(f"on {chip} (layers: {layers})" in text for stages in found.stages for chip, layers in stages)
    alone = found.alone
    assert 2.0 < alone[1].step_time_s / alone[0].step_time_s < 4.5
    assert [each.chips for each in alone] == ["new", "old"]


def test_a_mixed_plan_above_the_sum_of_its_chips_is_explained() -> None:
    names: dict[str, Any] = {"chips": "a + b", "devices": 4, "candidate": {}, "implementation": "local"}
    plan = ChipPlan(**names, tokens_per_second=1.0, step_time_s=3.0)
    mixing = Mixing(mixed=plan, idle={"a": 0.27}, limit="bubble", slowest="a")
    assert "27%" in verdict(mixing)
    alone = ChipPlan(**names, tokens_per_second=0.9, step_time_s=3.0, time={"compute_s": 2.4, "tp_comm_s": 0.6})
    kinds = (replace(alone, unlimited_tokens_per_second=rate) for rate in (0.9, 1.5))
    texts = [verdict(replace(mixing, alone=(each,))) for each in kinds]
    assert [("111%" in text, "20%" in text, "1.5" in text) for text in texts] == [(1, 1, 0), (1, 0, 1)]
    assert "111%" not in verdict(replace(mixing, alone=(alone,), unable=("c",)))
