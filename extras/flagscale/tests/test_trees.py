"""Trees of FlagScale's shape, with its special cases, become specs; the conversion of each key is reported."""

import contextlib
import copy
import functools
import json
import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_flagscale import FlagScale, Imported, history, source, translate
from flagcore_flagscale.compose import compose
from flagcore_flagscale.source import RESERVED_ARGUMENTS
from flagcore_llamacpp import engine as llama_knobs
from flagcore_megatron import start
from flagcore_megatron.space.options import settings_in_force
from flagcore_sglang import engine as sglang_knobs
from flagcore_vllm import engine as vllm_knobs

import flagcore
from extras.flagscale.tests.accounting import TREES, unaccounted
from flagcore.errors import SpecError
from flagcore.spec.convert import parse_spec
from flagcore.spec.plain_data import commented_yaml
from tests.checks import refuses
from tests.product.block_checks import ROOT
from tests.product.cli.conftest import Ran
from tests.product.cli.conftest import flag as flag
from tests.product.tasks import ENGINES

pytestmark = [pytest.mark.slow, pytest.mark.spread]

read_tree = FlagScale().read_tree
Flag = Callable[..., Ran]

SPACE = "experiment.auto_tuner.space"
ALL = tuple(TREES)
TRAIN = tuple(name for name in ALL if name.startswith("train"))
FUZZED = ("train_hetero", "serve_vllm")
"""Trees that have between them most keys."""


def mostly_long(shorter: tuple[str, ...], names: tuple[str, ...] = ALL) -> list[Any]:
    """Return trees as parameters, all but some of them long."""
    return [pytest.param(name, marks=() if name in shorter else pytest.mark.long) for name in names]


def tree(name: str, *overrides: str) -> Imported:
    if overrides:
        return read_tree(Path(name), "tune", overrides)
    whole, unresolved = composed(name)
    return translate(copy.deepcopy(whole), unresolved, file=f"{name}/tune.yaml")


@functools.cache
def composed(name: str) -> tuple[dict[str, Any], Any]:
    """Return a tree as hydra composes it, to read or to copy: composing takes long."""
    return compose(Path(name), "tune", (), file=f"{name}/tune.yaml")


def notes(found: Imported) -> dict[str, str]:
    return {note.key: note.text for note in found.notes}


def test_a_dense_tree_reports_its_job_and_devices() -> None:
    data = tree("train_dense", "action=auto_tune").data
    spec = parse_spec(data, file="x", base=Path(), engines=ENGINES)
    assert (spec.cluster.nodes, spec.cluster.devices_per_node) == (1, 8)
    assert spec.model.num_query_groups == 4
    assert spec.model.vocab_size == 151851
    assert spec.model.untie_embeddings_and_output_weights
    assert (spec.train.seq_length, spec.train.global_batch_size, spec.train.precision) == (4096, 128, "bf16")
    assert spec.space["tensor_model_parallel_size"] == (1, 2, 4)
    assert spec.space["data_parallel_size"] == spec.space["sequence_parallel"] == "auto"
    assert spec.baseline is not None
    assert spec.baseline["tensor_model_parallel_size"] == 2
    assert spec.baseline["sequence_parallel"] is True
    assert (spec.control.train_iters, spec.control.max_time, spec.control.run_best) == (6, 7200, False)
    assert data["envs"] == {"CUDA_DEVICE_MAX_CONNECTIONS": 1, "SOME_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


def test_missing_keys_of_a_tree_have_megatrons_defaults() -> None:
    removed = ("swiglu", "group_query_attention", "untie_embeddings_and_output_weights", "ffn_hidden_size")
    model = tree("train_dense", *(f"~train.model.{key}" for key in removed)).data["model"]
    assert model["gated_linear_unit"] is model["untie_embeddings_and_output_weights"] is False
    assert "num_query_groups" not in model
    assert model["ffn_hidden_size"] == 4 * 3584


def test_a_training_tree_starts_its_entrypoint_with_all_of_its_flags() -> None:
    found = tree("train_dense", "train.data.data_path=[1, a, 2, b]", "~experiment.cmds")
    program, *words = found.data["train"]["command"]
    parser = ArgumentParser(allow_abbrev=False)
    for name in ("--nnodes", "--nproc_per_node", "--rdzv_endpoint", "--save"):
        parser.add_argument(name)
    parser.add_argument("--data-path", nargs="+")
    options, others = parser.parse_known_args(words)
    assert (program, options.nnodes, options.nproc_per_node) == ("torchrun", "1", "8")
    assert options.rdzv_endpoint == "localhost:0"
    assert options.data_path == ["1", "a", "2", "b"]
    assert options.save == os.path.abspath("outputs/dense/checkpoints")
    assert {"flagscale/train/train_gpt.py", "--sequence-parallel", "--overlap-grad-reduce", "--never-heard-of"} <= {
        *others
    }


def test_flags_have_the_form_of_flagscale() -> None:
    system = ("tp_comm_overlap=false", "num_layers_per_virtual_pipeline_stage=null")
    model = ("mrope_section=[71,72]", "init=null", "my_path=xxx")
    added = *(f"++train.system.{each}" for each in system), *(f"++train.model.{each}" for each in model)
    before, after = (
        tree("train_dense", "train.data.data_path=a", *extra).data["train"]["command"] for extra in ((), added)
    )
    words = [word for word in after if word not in before]
    assert words == ["--mrope-section", "71", "72", "--init", "None", "--my-path", "???"]


def test_commands_before_the_start_run_in_the_shell_of_torchrun() -> None:
    command = tree("train_dense").data["train"]["command"]
    assert command[:5] == ["bash", "-c", 'ulimit -n 65536\nexec "$@"', "before_start", "torchrun"]


def exporting(commands: str | None, *, own: bool) -> Imported:
    """Return the tree of a server with these commands before its start, and with a variable of its own."""
    whole, unresolved = composed("serve_cloud")
    changed = copy.deepcopy(whole)
    changed["experiment"] |= {"cmds": {} if commands is None else {"before_start": commands}}
    changed["experiment"].setdefault("envs", {}).update({"OWN": "mine"} if own else {})
    return translate(changed, unresolved, file="serve_cloud/tune.yaml")


@pytest.mark.parametrize(
    ("commands", "envs", "dropped"),
    [
        ("export A=1,2 B=x;export C=", {"A": "1,2", "B": "x", "C": ""}, False),
        ("source env.sh && export A=1", {"A": "1"}, True),
        ("export A=$HOME", {}, True),
        ("export A=1 && export OWN=2", {"A": "1", "OWN": "mine"}, False),
        ("export CUDA_VISIBLE_DEVICES=0", {}, False),
        ("", {}, False),
    ],
)
def test_variables_that_a_server_tree_exports_before_the_start_are_kept(
    commands: str, envs: dict[str, str], dropped: bool
) -> None:
    plain, found = (exporting(before, own="OWN" in commands) for before in (None, commands))
    assert found.data.get("envs", {}) == plain.data.get("envs", {}) | envs
    assert ("experiment.cmds" in " ".join(notes(found))) == dropped


def test_flagscale_is_found_and_its_folders_are_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "elsewhere"
    runner = root / "flagscale" / "runner" / "runner_train.py"
    runner.parent.mkdir(parents=True)
    runner.write_text('f.write(f"export PYTHONPATH={megatron_dir}:{root_dir}:${{PYTHONPATH}}")')
    monkeypatch.setenv("PYTHONPATH", str(root))
    data = tree("train_dense").data
    assert data["train"]["directory"] == str(root)
    assert data["envs"]["PYTHONPATH"] == f"{root}/third_party/Megatron-LM:{root}:{root}"
    assert tree("train_dense", "+experiment.envs.PYTHONPATH=mine").data["envs"]["PYTHONPATH"] == "mine"


def test_without_flagscale_or_with_a_value_that_is_missing_no_trial_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = tree(
        "train_dense", "~experiment.cmds", "~train.model.never_heard_of", "++train.data.tokenizer.tokenizer_path=xxx"
    )
    spec = parse_spec(found.data, file="x", base=Path(), engines=ENGINES)
    with pytest.raises(SpecError) as caught:
        start.ready(spec)
    keys = {error.key for error in found.translate_error(caught.value).problems}
    assert keys == {"experiment.task.entrypoint", "train.data.data_path", "train.data.tokenizer.tokenizer_path"}


@pytest.mark.parametrize(("override", "starts"), [((), True), (("++experiment.runner.hostfile=null",), False)])
def test_a_job_of_several_nodes_starts_on_its_hosts_and_not_on_one(override: tuple[str, ...], starts: bool) -> None:
    found = tree("train_moe", "+train.data.data_path=a", *override)
    spec = parse_spec(found.data, file="x", base=Path(), engines=ENGINES)
    assert spec.on_each_host == starts
    with pytest.raises(SpecError) as caught:
        start.ready(spec)  # FlagScale is not installed
    assert ("torchrun" in [error.value for error in caught.value.problems]) != starts


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("train.system.tensor_model_parallel_size=3", "does not divide 8 devices"),
        ("train.model.micro_batch_size=3", "12 samples at once"),
        ("+train.system.pipeline_model_parallel_size=8", "does not divide 8"),
        ("train.model.num_layers=27", ""),
    ],
)
def test_sizes_that_cannot_run_are_not_a_baseline(override: str, why: str) -> None:
    found = tree("train_dense", override)
    assert ("baseline" in found.data["auto_tuner"]) == (not why)
    assert why in notes(found).get("train.system", "")


def test_a_tree_of_experts_over_nodes_keeps_all_settings_for_the_prediction() -> None:
    spec = parse_spec(tree("train_moe").data, file="x", base=Path(), engines=ENGINES)
    assert (spec.cluster.nodes, spec.cluster.hosts) == (2, ("node-a", "node-b"))
    assert spec.cluster.memory_bytes_per_device == 32768 << 20
    model = spec.model
    assert (model.num_moe_experts, model.moe_first_dense_layers, model.mtp_num_layers) == (64, 1, 1)
    assert (model.qk_head_dim, model.v_head_dim) == (128, 128)
    settings = settings_in_force(spec)
    assert settings["overlap_grad_reduce"] is True
    assert settings["num_layers_in_first_pipeline_stage"] == 13
    assert settings["attention_dropout"] == 0.1


def test_precision_and_settings_come_from_the_tree_on_any_number_of_nodes() -> None:
    for nodes in (1, 2):
        found = tree("train_newest", f"experiment.runner.nnodes={nodes}")
        spec = parse_spec(found.data, file="x", base=Path(), engines=ENGINES)
        assert spec.train.precision == "fp8"
        assert settings_in_force(spec)["recompute_modules"] == "layernorm,moe_act"


@pytest.mark.parametrize(
    ("overrides", "baseline"),
    [
        (("recompute_method=block", "recompute_num_layers=0"), {"use_recompute": False}),
        (("recompute_method=uniform", "recompute_num_layers=0"), {"recompute_method": "uniform"}),
        (("recompute_method=block", "recompute_num_layers=2"), {"recompute_num_layers": 2}),
    ],
)
def test_no_recomputed_layers_are_no_recomputation(overrides: tuple[str, ...], baseline: dict[str, Any]) -> None:
    arguments = ("recompute_granularity=full", *overrides)
    found = tree(
        "train_dense", *(f"++train.system.{each}" for each in arguments), f"{SPACE}.recompute_num_layers=[0,4]"
    )
    parse_spec(found.data, file="x", base=Path(), engines=ENGINES)
    assert baseline.items() <= found.data["auto_tuner"]["baseline"].items()
    assert "recompute_num_layers" not in found.data["auto_tuner"]["baseline"] or "recompute_num_layers" in baseline
    assert found.data["auto_tuner"]["space"]["recompute_num_layers"] == [4]


@pytest.mark.parametrize("variable", ["GEMS_VENDOR=kunlunxin", "BKCL_TIMEOUT=9", "MACA_PATH=/opt/maca"])
def test_the_vendor_of_the_variables_decides_which_devices_are_meant(variable: str, folder: Path, flag: Flag) -> None:
    arguments = ("--config-path", "train_dense", "--config-name", "tune", f"+experiment.envs.{variable}")
    flag("estimate", *arguments).refused(4, "metax" if "MACA" in variable else "kunlunxin")
    if "MACA" in variable:
        assert flag("estimate", *arguments, "--chip", "H100-SXM").code == 0


def test_a_model_without_attention_is_reported() -> None:
    found = tree("train_dense", "++experiment.task.entrypoint=flagscale/train/train_rwkv.py")
    assert any("plain decoder" in note.text for note in found.notes if note.key == "experiment.task.entrypoint")


def test_a_tree_in_groups_is_composed_as_hydra_does() -> None:
    found = tree("train_groups")
    spec = parse_spec(found.data, file="x", base=Path(), engines=ENGINES)
    assert (spec.cluster.nodes, spec.model.num_layers, spec.train.global_batch_size) == (2, 16, 64)
    assert spec.space["tensor_model_parallel_size"] == (1, 2)
    assert spec.control.max_time_per_task == 300
    reported = notes(found)
    assert "HydraConfig was not set" in reported["experiment.exp_dir"]
    assert "more than two stages" in reported["experiment.auto_tuner.space.num_layers_per_virtual_pipeline_stage"]


def test_flags_of_one_node_of_several_and_relative_paths_do_not_reach_a_server(folder: Path) -> None:
    arguments = tree("serve_pairs").data["serve"]["engine_args"]
    assert not {"node_rank", "dist_init_addr", "host"} & arguments.keys()
    assert arguments["attention_backend"] == "triton"
    assert tree("serve_cloud").data["serve"]["engine_args"]["tokenizer"] == str(folder / "model")
    long = tree("serve_cloud", "+serve.0.engine_args.chat_template=" + "x" * 300)
    assert len(long.data["serve"]["engine_args"]["chat_template"]) == 300


def test_a_public_name_of_the_weights_is_kept() -> None:
    assert tree("serve_vllm", "serve.0.engine_args.model=Qwen/Qwen3-8B").data["model"] == "Qwen/Qwen3-8B"


def test_instances_that_only_prefill_or_decode_become_one_candidate() -> None:
    deploy = "experiment.runner.deploy.prefill_decode_disaggregation=true"
    vllm = ("experiment.auto_tuner.engines=[vllm]", "serve.0.engine_args_specific.vllm.tensor_parallel_size=2")
    found = tree("serve_pairs", deploy, *vllm)
    space = found.data["auto_tuner"]["space"]
    assert space["prefill_decode"] == ["2xtp2+1xtp2"]
    assert space["kv_transfer"] == ["P2pNcclConnector"]
    assert not {"instances", "tensor_model_parallel_size", "pipeline_model_parallel_size"} & space.keys()
    assert not {"tensor_parallel_size", "tensor_model_parallel_size"} & found.data["serve"]["engine_args"].keys()
    assert "experiment.runner.deploy.decode_gpu_memory_utilization" in notes(found)
    assert parse_spec(found.data, file="x", base=Path(), engines=ENGINES).space["prefill_decode"] == ("2xtp2+1xtp2",)


@pytest.mark.parametrize(("lines", "launcher"), [("a slots=8\nb slots=8\n", "ssh"), ("a slots=8\n", "local")])
def test_servers_start_on_the_hosts_of_the_hostfile(lines: str, launcher: str) -> None:
    Path("hosts.txt").write_text(lines)
    vllm = ("experiment.auto_tuner.engines=[vllm]", "++experiment.runner.hostfile=hosts.txt")
    found = tree("serve_pairs", *vllm, f"++experiment.runner.nnodes={len(lines.splitlines())}")
    spec = parse_spec(found.data, file="x", base=Path(), engines=ENGINES)
    assert (spec.cluster.nodes, spec.launcher) == (len(lines.splitlines()), launcher)


def test_the_width_is_computed() -> None:
    extra = ("~train.model.ffn_hidden_size", "+train.model.multiple_of=4096", "+train.model.hidden_dim_multiplier=1.3")
    assert tree("train_dense", *extra).data["model"]["ffn_hidden_size"] == 16384


def test_a_hostfile_of_several_chips_is_read_and_a_broken_one_is_refused() -> None:
    Path("hosts.txt").write_text("a slots=8 type=A800\nb slots=8 type=C550\n")
    spec = parse_spec(tree("train_moe").data, file="x", base=Path(), engines=ENGINES)
    assert [(group.chip, group.nodes) for group in spec.cluster.groups] == [("A800", 1), ("C550", 1)]
    Path("hosts.txt").write_text("a slots=8\nb slots=4\n")
    found = tree("train_moe")
    assert found.data["cluster"]["nodes"] == 2
    assert "line 2 of hosts.txt differs in slots" in notes(found)["experiment.runner.hostfile"]
    for text, message in {
        "a slots=8\na slots=8\n": "hosts.txt: line 2 = 'a slots=8' repeats a host",
        "# nobody\n": "hosts.txt: experiment.runner.hostfile names no host",
    }.items():
        Path("hosts.txt").write_text(text)
        with pytest.raises(SpecError, match=message):
            tree("train_moe")


def test_a_missing_hostfile_keeps_the_sizes() -> None:
    Path("hosts.txt").unlink()
    found = tree("train_moe")
    assert found.data["cluster"]["nodes"] == 2
    assert "dropped" in notes(found)["experiment.runner.hostfile"]


@pytest.mark.parametrize(
    ("overrides", "devices", "hostfile"),
    [
        ((), 8, True),
        (("experiment.runner.nproc_per_node=4",), 4, False),
        (("+experiment.envs.SOME_VISIBLE_DEVICES='0,1,2'",), 3, False),
        (("~experiment.runner.nproc_per_node", "~experiment.runner.nnodes"), 8, True),
    ],
)
def test_the_minimum_of_slots_processes_and_visible_devices_counts(
    overrides: tuple[str, ...], devices: int, hostfile: bool
) -> None:
    found = tree("train_moe", *overrides)
    spec = parse_spec(found.data, file="x", base=Path(), engines=ENGINES)
    assert (spec.cluster.nodes, spec.cluster.devices_per_node) == (2, devices)
    assert ("hostfile" in found.data["cluster"]) is hostfile
    assert spec.launcher == ("ssh" if hostfile else "local")
    assert ("experiment.runner.hostfile" in notes(found)) is not hostfile


def with_pattern(pattern: str) -> Imported:
    """Return the tree of experts with this pattern of layers."""
    whole, unresolved = composed("train_moe")
    changed = copy.deepcopy(whole)
    changed["train"]["model"]["moe_layer_freq"] = int(pattern) if pattern.isdecimal() else pattern
    return translate(changed, unresolved, file="train_moe/tune.yaml")


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [("[0]*3+[1]*24", 3), ("([0]*3+[1]*24)", 3), ("3*[0] + 24*[1]", 3), ("[0, 1]+[1]*25", 1), ("1", 0), ("[1]*27", 0)],
)
def test_dense_layers_come_first(pattern: str, dense: int) -> None:
    assert with_pattern(pattern).data["model"].get("moe_first_dense_layers", 0) == dense


@pytest.mark.parametrize(
    "pattern",
    [
        *("2", "0", "[1]*13+[0]*14", "[1]*5", "[0]*27", "[1]**27", "[1]*[27]", "[1]*True", "[0]+1"),
        *("([0]+[1]*99999)*99999", "[" * 500, "x", "[0]+[len([1])]*26"),
    ],
)
def test_another_pattern_of_experts_is_refused(pattern: str) -> None:
    with refuses("train.model.moe_layer_freq"):
        with_pattern(pattern)


TUNER = "experiment.auto_tuner"
MISTAKES: dict[str, dict[str, Any]] = {
    "train_moe": {
        "train.model.global_batch_size": None,
        "train.model.moe_layer_freq": "x",
        "experiment.runner.nproc_per_node": "many",
        f"{TUNER}.control.run_best": "maybe",
        f"{TUNER}.memory_model.gpu_memory": -1,
    },
    "train_dense": dict.fromkeys(("train.model.num_layers", "train.model.hidden_size", "train.model.seq_length")),
    "serve_vllm": {f"{TUNER}.control.run_best": "maybe", f"{TUNER}.performance.metric": "speed"},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_all_mistakes_of_a_tree_are_reported(name: str) -> None:
    wrong = MISTAKES[name]
    overrides = [f"++{key}={value}" if value is not None else f"~{key}" for key, value in wrong.items()]
    with pytest.raises(SpecError) as caught:
        tree(name, *overrides)
    assert {each.key: each.value for each in caught.value.problems} == wrong


def test_keys_that_vllm_refuses_are_dropped_and_reported() -> None:
    found = tree("serve_vllm")
    space, reported = found.data["auto_tuner"]["space"], notes(found)
    assert space["block_size"] == [16, 32]
    assert "swap_space" not in space
    assert space["instances"] == "auto"
    assert space["max_num_seqs"] == [64, 128]
    assert space["enforce_eager"] == [True, False]
    assert "8 is dropped" in reported[f"{SPACE}.vllm.block_size"]
    assert "0.18" in reported[f"{SPACE}.vllm.swap_space"]
    assert "ignored by FlagScale" in reported[f"{SPACE}.max_num_seqs"]
    assert "with vllm" in reported[f"{SPACE}.enforce_eager"]
    assert "not a knob" in reported[f"{SPACE}.no_such_knob"]
    spec = parse_spec(found.data, file="x", base=Path(), engines=ENGINES)
    assert spec.objective == "total_tokens_per_s"
    assert spec.serve.engine_args["max_model_len"] == 4096
    assert not {"host", "port", "served_model_name"} & spec.serve.engine_args.keys()
    (load,) = spec.serve.loads
    assert (load.range_ratio, load.prefix_len, load.request_rate) == (0.5, 0, float("inf"))


def test_a_llama_cpp_tree_finds_its_weights_and_shares_one_context(folder: Path) -> None:
    (folder / "b.gguf").touch()
    (folder / "a.gguf").touch()
    found = tree("serve_llama_cpp")
    assert found.data["model"] == str(folder / "a.gguf")
    assert found.data["serve"]["engine"] == "llamacpp"
    assert found.data["auto_tuner"]["objective"] == "tpot_s"
    expected = {"ctx_size": 1000, "parallel": 2, "kv_cache_type": "q8_0", "threads": 1}
    assert found.data["serve"]["engine_args"] == expected


@pytest.mark.parametrize(
    ("override", "nodes", "devices"), [("", 2, 8), ("+experiment.runner.nnodes=1", 1, 8), ("~serve.hostfile", 1, 8)]
)
def test_hosts_are_counted_in_addition_to_models(override: str, nodes: int, devices: int) -> None:
    cluster = tree("serve_hosts", *filter(None, [override])).data["cluster"]
    assert (cluster["nodes"], cluster["devices_per_node"]) == (nodes, devices)


def test_each_engine_has_its_knobs_or_the_space_of_flagscale() -> None:
    extra = ("experiment.auto_tuner.engines=[vllm,sglang]", "+experiment.auto_tuner.space.sglang.instace=[1]")
    data = tree("serve_vllm", *extra).data
    assert data["serve"]["engine"] == ["vllm", "sglang"]
    space = data["auto_tuner"]["space"]
    assert space["sglang"] == {"instances": [1], "enforce_eager": [True, False], "context_len": 4096}
    assert space["vllm"]["gpu_memory_utilization"] == 0.9
    bare = tree("serve_vllm", "~experiment.auto_tuner.space", "experiment.auto_tuner.engines=sglang").data
    assert bare["auto_tuner"]["space"]["page_size"] == [32, 64, 128]


@pytest.mark.parametrize("name", mostly_long(("serve_llama_cpp", "serve_many", "train_dense", *FUZZED, "train_moe")))
def test_every_key_of_a_tree_has_an_effect_or_is_reported(name: str) -> None:
    assert unaccounted(copy.deepcopy(composed(name)[0])) == []


@pytest.mark.parametrize("name", ALL)
def test_the_written_spec_reads_back_with_a_comment_for_every_note(name: str) -> None:
    found = tree(name)
    text = commented_yaml(found)
    assert yaml.safe_load(text) == found.data
    comments = " ".join(line.strip().removeprefix("#").strip() for line in text.splitlines() if "#" in line)
    assert [note for note in found.notes if " ".join(str(note).split()) not in comments] == []


@pytest.mark.parametrize(
    ("override", "key"), [("hydra.job.chdir=false", "job.chdir"), ("hydra/launcher=basic", "launcher")]
)
def test_hydras_own_keys_are_reported(override: str, key: str) -> None:
    (reported,) = (each for each in notes(tree("train_dense", override)) if each.startswith("hydra ("))
    assert {"run.dir", key} == set(reported[len("hydra (") : -1].split(", "))


@pytest.mark.parametrize("override", ["action='auto_tune'", "+action=auto_tune", "++action=auto_tune", "~action"])
def test_the_action_may_have_any_hydra_spelling(override: str) -> None:
    assert tree("train_dense", override).data == tree("train_dense").data


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "step"),
    [*((name, 11) for name in FUZZED), *(pytest.param(name, 1, marks=pytest.mark.long) for name in ALL)],
)
def test_any_invalid_value_gives_a_spec_or_a_spec_error(name: str, step: int) -> None:
    full = composed(name)[0]
    same = translate(full, file="x").data
    for number, (odd, path) in enumerate(product(("x", [1], 0, None, {"a": [True]}), _paths(full))):
        if number % step:
            continue
        changed = copy.deepcopy(full)
        section: Any = changed
        for part in path[:-1]:
            section = section[part]
        section[path[-1]] = odd
        with contextlib.suppress(SpecError):
            if (data := translate(changed, file="x").data) != same:
                parse_spec(data, file="x", base=Path(), engines=ENGINES)


def _paths(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from _paths(value, (*at, key))


def test_flags_that_an_engine_refuses_to_take_never_come_into_its_arguments() -> None:
    refused = {name for module in (vllm_knobs, sglang_knobs, llama_knobs) for name in module.ENGINE.program.reserved}
    assert {name.replace("-", "_") for name in refused} - RESERVED_ARGUMENTS.keys() == {
        "model",
        "model_path",
        "model_tag",
        "disaggregation_mode",  # refused before
    }


@pytest.mark.parametrize("name", mostly_long(("train_hetero",), TRAIN))
def test_a_training_tree_is_estimated_for_another_chip(name: str, folder: Path, flag: Flag) -> None:
    pytest.importorskip("flagcore_nvidia")
    arguments = ("--config-path", name, "--config-name", "tune", "--chip", "H100-SXM", "--json")
    if name == "train_newest":  # Megatron refuses its optimizer with use_megatron_fsdp
        assert flag("estimate", *arguments, "action=auto_tune").code == 2
        arguments = (*arguments, "train.model.optimizer.optimizer=adam")
    done = flag("estimate", *arguments, "action=auto_tune").worked()
    assert "experiment.exp_dir" in done.err
    assert json.loads(done.out)[0]["step_time_s"]["value"] > 0


@pytest.mark.parametrize(
    "name", mostly_long(("train_moe", "serve_pairs"), ("train_moe", "train_groups", "serve_pairs", "serve_hosts"))
)
def test_a_tree_and_the_spec_converted_from_it_have_the_same_candidates(name: str, folder: Path) -> None:
    pytest.importorskip("flagcore_nvidia")
    (folder / "elsewhere").mkdir()
    found, written = tree(name), folder / "elsewhere" / "spec.yaml"
    written.write_text(commented_yaml(found))
    direct, imported = (flagcore.estimate(arguments, chip="H100-SXM") for arguments in (found.data, written))
    assert direct.candidates == imported.candidates
    assert direct.candidates


def test_an_imported_file_is_a_spec_and_is_not_written_twice(folder: Path, flag: Flag) -> None:
    arguments = ("import", "flagscale", "train_dense", "--config-name", "tune", "-o", "spec.yaml")
    done = flag(*arguments)
    assert (done.code, done.out) == (0, "")
    assert parse_spec(yaml.safe_load((folder / "spec.yaml").read_text()), file="x", base=folder, engines=ENGINES)
    assert flag(*arguments).code == 2


def test_docs_describe_every_column_of_a_history_that_is_read() -> None:
    page = (ROOT / "docs" / "flagscale.md").read_text(encoding="utf-8").partition("## Conversion of keys")[0]
    names = {*history.NO_KNOBS, *source.KNOB_NAMES} - {"", *history.SPLITS}
    assert [name for name in names if f"`{name}`" not in page] == []
