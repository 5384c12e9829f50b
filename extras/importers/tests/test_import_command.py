"""A spec from a command: the baseline is the command, and nothing of it is lost without a note."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_importers import shell
from flagcore_importers.command import read_command

from engines.serving.tests.engines.tasks import engine_of, planned, server
from flagcore import api
from flagcore.api.inputs import open_spec
from flagcore.contracts import ImportedSpec
from flagcore.domain.launch import PORT
from flagcore.errors import SpecError, UsageError
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import commented_yaml

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}
FIRST = "--decoder-first-pipeline-num-layers"
TRAINING = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 8 --swiglu --disable-bias-linear --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 2 --global-batch-size 64 --bf16 --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --attention-dropout 0 --hidden-dropout 0 --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model model --lr 1e-4 --train-iters 100"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "run.sh").write_text(
        f"#!/bin/bash\nGPUS=4\ntorchrun --nproc_per_node $GPUS pretrain_gpt.py {TRAINING}\n"
    )
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keys(imported: ImportedSpec) -> set[str]:
    return {note.key for note in imported.notes}


def test_a_schedule_of_batches_has_its_last_one() -> None:
    training = TRAINING.replace("--global-batch-size 64", "--step-batch-size-schedule '0:384 200B:768 400B:1152'")
    imported = read_command("megatron", [f"torchrun --nproc-per-node=4 pretrain_gpt.py {training}"], chip="H100-SXM")
    assert imported.data["train"]["global_batch_size"] == 1152
    assert any("step-batch-size-schedule" in key for key in keys(imported))


@pytest.mark.parametrize("words", [["run.sh"], [f"torchrun --nproc-per-node=4 pretrain_gpt.py {TRAINING}"]])
def test_a_training_command_is_its_own_baseline(words: list[str], tmp_path: Path) -> None:
    data = read_command("megatron", words, chip="H100-SXM").data
    assert data["model"]["vocab_size"] == CONFIG["vocab_size"]
    assert data["model"]["num_query_groups"] == 8
    assert "add_qkv_bias" not in data["model"]
    assert data["cluster"] == {"chip": "H100-SXM", "nodes": 1, "devices_per_node": 4}
    assert data["train"]["command"][0] in ("bash", "torchrun")
    assert data["train"]["directory"] == str(tmp_path)
    values = open_spec(data, None, (), plan=True).problem.baseline.as_dict()
    assert (values["tensor_model_parallel_size"], values["micro_batch_size"]) == (2, 2)
    assert values["sequence_parallel"]
    assert values["use_distributed_optimizer"]
    assert not values["use_recompute"]


@pytest.mark.parametrize(("section", "form"), [("ARGS", "{}"), ("MODEL_ARGS", "--{}")])
def test_a_recipe_has_arguments_by_key_and_the_fewest_devices(section: str, form: str, tmp_path: Path) -> None:
    words = TRAINING.replace("2 --sequence-parallel", "2 --pipeline-model-parallel-size 8").split(" --")
    given = {name.lstrip("-"): value for name, _, value in (word.partition(" ") for word in words)}
    values = {**given, "recompute-granularity": "selective", "recompute-modules": ["core_attn", "mlp"]}
    spelled = {
        form.format(name if "--" in form else name.replace("-", "_")): value or True for name, value in values.items()
    }
    recipe = {"ENV_VARS": {"NCCL_DEBUG": "INFO"}, section: {**spelled, form.format("sequence_parallel"): False}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    imported = read_command(None, ["recipe.yaml"], chip="H100-SXM")
    data: Any = imported.data
    assert data["cluster"] == {"chip": "H100-SXM", "nodes": 2, "devices_per_node": 8}
    assert (data["envs"], data["model"]["num_layers"]) == ({"NCCL_DEBUG": "INFO"}, 8)
    assert data["auto_tuner"]["baseline"]["pipeline_model_parallel_size"] == 8
    assert {"--recompute-modules", "mlp"} < {*data["train"]["command"]}
    assert "sequence_parallel" not in data["auto_tuner"]["baseline"]
    assert not keys(imported) & {"num_layers", "--num-layers"}


def test_a_recipe_of_primus_has_its_overrides_and_takes_its_model_from_the_user(tmp_path: Path) -> None:
    overrides = {"seq_length": 2048, "global_batch_size": 64, "micro_batch_size": 2, "finetune": False, "load": None}
    recipe = {"modules": {"pre_trainer": {"framework": "megatron", "model": "own.yaml", "overrides": overrides}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    data: Any = read_command(None, ["recipe.yaml"], chip="MI355X", model="model").data
    assert data["cluster"] == {"chip": "MI355X", "nodes": 1, "devices_per_node": 8}
    assert (data["train"]["seq_length"], data["train"]["precision"]) == (2048, "bf16")
    assert data["auto_tuner"]["baseline"]["use_distributed_optimizer"]
    assert not {"--finetune", "--no-finetune", "--load"} & {*data["train"]["command"]}


INPUTS, UNKNOWN_KEYS, FOUND_INPUTS = yaml.safe_load_all(Path(__file__).with_name("inputs.yaml").read_text())
IMAGES = {"vllm": "vllm/vllm-openai:v0.11.0", "sglang": "lmsysorg/sglang:v0.5.5"}
OWN = {"GEMS_VENDOR", "CUDA_DEVICE_MAX_CONNECTIONS", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES"}


def shown(data: Any) -> list[Any]:
    """The data of a spec without what only states a default, and without the variables that flagcore adds."""
    work = data.get("train") or data["serve"]
    baseline = {name: value for name, value in data["auto_tuner"]["baseline"].items() if value != 1}
    envs = {*data.get("envs", {})} - OWN
    others = {name: work.get(name) for name in ("engine", "engine_args", "seq_length", "global_batch_size")}
    return [data["model"], {"nodes": 1, **data["cluster"]}, baseline, envs, others]


@pytest.mark.costly
@pytest.mark.parametrize("name", INPUTS)
def test_an_export_comes_back_as_the_same_spec(name: str, tmp_path: Path) -> None:
    text, targets = INPUTS[name]["input"], INPUTS[name]["targets"]
    (tmp_path / "c.yaml").write_text("model: model\nmax-model-len: 4096\n")
    (tmp_path / name).write_text(text)
    imported = read_command(None, [name if "." in name else text], chip="H100-SXM")
    data: Any = imported.data
    engine = (data.get("train") or data["serve"])["engine"]
    data["auto_tuner"]["space"] = dict(data["auto_tuner"]["baseline"])
    (tmp_path / "spec.yaml").write_text(commented_yaml(imported))
    for target in targets.split():
        options = {"image": IMAGES.get(engine, "image:1")} if target in ("kubernetes", "compose") else {}
        file = api.export("spec.yaml", target, "baseline", output=f"out-{target}", name="job", options=options).files[0]
        assert shown(read_command(None, [str(file)], chip="H100-SXM").data) == shown(data), target


COMMANDS = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python3", "-m", "sglang.launch_server"),
    "llamacpp": ("llama-server",),
    "lmdeploy": ("lmdeploy", "serve", "api_server"),
}
NO_FLAG = {"instances", "prefill_decode", "kv_transfer", "data_parallel_size", "pipeline_model_parallel_size"} | {
    "prefill_all2all_backend"  # of instances that only prefill
}


@pytest.mark.parametrize("engine", COMMANDS)
def test_each_knob_of_a_server_is_imported_from_its_flag(engine: str) -> None:
    values: dict[str, Any] = {
        knob.name: {"flag": not knob.neutral, "share": "0.5"}.get(knob.kind, knob.words[-1] if knob.words else 2)
        for knob in engine_of(engine).knobs
        if knob.name not in (NO_FLAG | {"threads"} if engine == "vllm" else NO_FLAG)
    }
    values |= {"context_len": 4096} | ({"split_mode": "row"} if engine == "llamacpp" else {})
    words = server(planned(engine, devices=8, command=COMMANDS[engine], weights="model.gguf"), **values).argv
    imported = read_command(engine, [each.replace(PORT, "8000") for each in words], chip="H100-SXM")
    baseline = imported.data["auto_tuner"]["baseline"]
    assert {name: baseline.get(name) for name in values} == values


def test_several_values_are_a_list_and_comments_stand_above_their_keys() -> None:
    imported = read_command("vllm", ["vllm serve model --lora-modules a=b c=d --max-num-seqs 8 9"])
    assert imported.data["serve"]["engine_args"] == {"lora-modules": ["a=b", "c=d"]}
    assert "--max-num-seqs" in keys(imported)
    imported = read_command("vllm", ["vllm serve model --max-num-seqs 8"])
    lines = commented_yaml(imported).splitlines()
    at = next(number for number, line in enumerate(lines) if "max_num_seqs: 8" in line)
    assert lines[at - 1].lstrip().startswith("# --max-num-seqs")


@pytest.mark.parametrize(
    ("engine", "words", "key"),
    [
        ("vllm", ["llama-server -m x"], "command"),
        ("vllm", ["vllm serve --max-num-seqs 8"], "model"),
        ("vllm", ["vllm serve model --max-num-seqs many"], "--max-num-seqs"),
        ("megatron", ["python train.py"], "command"),
        ("megatron", [f"torchrun pretrain_gpt.py {TRAINING.replace('--tokenizer-model model', '')}"], "--vocab-size"),
        ("megatron", ["torchrun pretrain_gpt.py --seq-length 8 --vocab-size 9 --num-layers 2"], "--hidden-size"),
        ("megatron", [f"torchrun pretrain_gpt.py {TRAINING} {FIRST} 0"], FIRST),
    ],
)
def test_a_command_that_cannot_be_read_is_an_error_of_its_argument(engine: str, words: list[str], key: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_command(engine, words)
    assert key in [each.key for each in caught.value.problems]


@pytest.mark.parametrize("words", [[""], ["vllm 'serve"]])
def test_unreadable_text_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(UsageError):
        read_command("vllm", words)


def test_a_flag_without_effect_is_not_replaced_with_what_others_mean() -> None:
    words = "python -m sglang.launch_server --model-path model --dp-size 1 --speculative-algorithm EAGLE"
    steps = " --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    notes = {note.key: note.text for note in read_command(None, [words + steps]).notes}
    assert "speculative_tokens" in notes["--speculative-num-steps"]
    assert "speculative_tokens" not in notes["--dp-size"]


def test_a_broken_yaml_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text("kind: Pod\nspec: [1,\n")
    with pytest.raises(UsageError, match=r"^pod\.yaml .* at line \d+, column \d+"):
        read_command(None, ["pod.yaml"])


def test_login_shells_of_a_script_do_not_read_the_profile_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bash_profile").write_text("export OF_PROFILE=1\n")
    (tmp_path / "start.sh").write_text("bash -lc 'vllm serve model'\n")
    assert "OF_PROFILE" not in read_command(None, ["start.sh"]).data.get("envs", {})


def test_the_model_may_be_given(tmp_path: Path) -> None:
    words = [f"torchrun pretrain_gpt.py {TRAINING.replace('--tokenizer-model model', '')}"]
    assert read_command("megatron", words, model="model").data["model"] == str(tmp_path / "model")


@pytest.mark.parametrize(("tokenizer", "size"), [("", 50257), ("--tokenizer-type Llama2Tokenizer", 32000)])
def test_the_vocabulary_of_a_published_tokenizer_is_known(tokenizer: str, size: int) -> None:
    words = TRAINING.replace("--tokenizer-type HuggingFaceTokenizer --tokenizer-model model", tokenizer)
    imported = read_command("megatron", [f"torchrun pretrain_gpt.py {words}"])
    assert imported.data["model"]["vocab_size"] == size
    assert "--vocab-size" in keys(imported)


def test_a_command_for_more_devices_has_no_baseline() -> None:
    experts = "--num-experts 8 --expert-model-parallel-size 8 --pipeline-model-parallel-size 4"
    words = TRAINING.replace("--tensor-model-parallel-size 2 --sequence-parallel", experts)
    imported = read_command("megatron", [f"torchrun --nproc-per-node 8 pretrain_gpt.py {words}"])
    assert "baseline" not in imported.data["auto_tuner"]
    assert "baseline" in keys(imported)


def test_a_script_that_stops_early_is_reported_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "stops.sh").write_text("mkdir -p out\necho wrong folder\nexit 3\n")
    with pytest.raises(SpecError) as caught:
        read_command("megatron", ["stops.sh"])
    assert "exit code 3: wrong folder" in caught.value.problem


def test_a_given_model_with_another_shape_is_an_error(tmp_path: Path) -> None:
    words = [f"torchrun pretrain_gpt.py {TRAINING.replace('--num-layers 8', '--num-layers 12 --num-experts 8')}"]
    with pytest.raises(SpecError) as caught:
        read_command("megatron", words, model="model")
    assert {each.key for each in caught.value.problems} == {"--num-layers", "--num-experts"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--hybrid-layer-pattern MEM*|EMEM/*E --num-experts 8 --moe-router-topk 2 --moe-latent-size 256",
            {"hybrid_override_pattern": "MEM*EMEM", "mamba_num_heads": 32, "moe_latent_size": 256}
            | {"num_hidden_layers": 8, "num_nextn_predict_layers": 1},
        ),
        (
            "--experimental-attention-variant gdn --linear-attention-freq 4 --linear-num-value-heads 16",
            {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_num_value_heads": 16},
        ),
        (
            "--window-size 128,0 --window-attn-skip-freq 2",
            {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 128},
        ),
    ],
    ids=["pattern", "linear", "windows"],
)
def test_other_kinds_of_layers_are_keys_of_a_configuration(words: str, expected: dict[str, Any]) -> None:
    command = f"torchrun --nproc-per-node=4 pretrain_gpt.py {TRAINING} {words}"
    model = read_command("megatron", [command], chip="H100-SXM").data["model"]
    assert model["model_type"] == "hybrid"
    assert {key: model[key] for key in expected} == expected
    assert model_from(model, base=Path()).layers


def test_a_script_that_takes_memory_without_end_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "MOST_BYTES", 1 << 26)
    (folder / "run.sh").write_text("a=xx\nwhile :; do a=$a$a; done\n")
    records, problem = shell.trace_script(("bash", "run.sh"), str(folder), {})
    assert not records
    assert "exit code" in problem


def test_a_flag_that_the_newest_release_lacks_is_left_out() -> None:
    found = read_command(None, ["vllm serve Qwen/Qwen3-8B --disable-log-requests --swap-space 4"])
    assert [*found.data["serve"]["engine_args"]] == ["swap-space"]
    assert any("dropped" in each.text for each in found.notes if "disable-log-requests" in str(each))


@pytest.mark.parametrize(
    "command",
    [
        "python -m openrlhf.cli.train_kd --pretrain a",
        "deepspeed --module openrlhf.cli.train_dpo --pretrain a",
        "accelerate launch examples/scripts/dpo_vlm.py --model_name_or_path a",
        "trl reward --model_name_or_path a",
    ],
)
def test_training_of_preferences_is_said_not_to_be_predicted(command: str) -> None:
    with pytest.raises(SpecError, match="starts training of preferences, rewards or a student"):
        read_command(None, command.split())
