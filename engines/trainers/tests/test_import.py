"""Commands of DeepSpeed and torchtitan come in as specs of their engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_importers.command import read_command
from flagcore_models.public import public_models
from flagcore_trainers.fully_shard import AC, MBS, TP
from flagcore_trainers.importing import TABLES
from flagcore_trainers.torchtitan import TORCHTITAN
from flagcore_training.frameworks import has_tiled_loss

from flagcore.api.inputs import open_spec
from flagcore.errors import SpecError
from tests.product.tasks import task

TOML = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 3
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "full"
"""


def test_a_command_with_a_configuration_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto", "bf16": {"enabled": True}}
    Path("ds.json").write_text(json.dumps(config))
    flags = "--model_name_or_path meta-llama/Meta-Llama-3.1-8B --per_device_train_batch_size 4 --max_seq_length 2048"
    flags += " --gradient_checkpointing True"
    Path("run.sh").write_text(
        f"deepspeed --num_gpus 8 --num_nodes 2 train.py --deepspeed ds.json {flags} --gradient_accumulation_steps 2\n"
    )
    data = read_command(None, ["run.sh"]).data
    assert data["train"]["engine"] == "deepspeed"
    assert data["cluster"] == {"chip": "auto", "nodes": 2, "devices_per_node": 8}
    assert data["train"]["global_batch_size"] == 4 * 2 * 16
    assert (data["train"]["seq_length"], data["train"]["precision"]) == (2048, "bf16")
    assert "{gradient_accumulation_steps}" in data["train"]["command"]
    assert data["train"]["program"]["fixed"] == {"recompute": 2}
    with pytest.raises(SpecError, match="seq_length"):
        read_command(None, ["deepspeed train.py --deepspeed ds.json --model_name_or_path Qwen/Qwen3-8B"])


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ({"tensor_parallel": {"autotp_size": 4}}, 2 * 4 * 2),
        ({"sequence_parallel_size": 4}, 2 * 4 * 2),
        ({"tensor_parallel": {"autotp_size": 4}, "train_batch_size": 2 * 4 * 8}, 2 * 4 * 2),
        ({"sequence_parallel_size": 4, "train_batch_size": 2 * 4 * 2}, 2 * 4 * 2),
        ({"tensor_parallel": {"autotp_size": 0}}, 2 * 4 * 8),
    ],
)
def test_devices_of_a_group_train_on_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, object], batch: int
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, **sizes}
    Path("ds.json").write_text(json.dumps(config))
    words = "deepspeed --num_gpus 8 train.py --deepspeed_config ds.json --model Qwen/Qwen3-8B --max_length 2048"
    found = read_command(None, [words])
    assert found.data["train"]["global_batch_size"] == batch
    assert "train_batch_size" not in {each.key for each in found.notes}


@pytest.mark.parametrize(
    ("call", "flag", "notes"),
    [
        ("deepspeed.initialize(model=m, config=own)", "--grad_checkpoint", {"config", "--grad_checkpoint"}),
        ("TrainingArguments(deepspeed={'a': 1})", "--gradient-checkpointing=false", {"config"}),
        ("deepspeed.initialize(model=m, config=args.path)", "--no_gradient_checkpointing", set[str]()),
    ],
)
def test_a_script_with_a_configuration_of_its_own_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, flag: str, notes: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": 8}')
    Path("train.py").write_text(f"own = {{'train_batch_size': 8}}\n{call}\n")
    words = f"deepspeed --num_gpus 8 train.py --deepspeed ds.json --model Qwen/Qwen3-8B --max_length 2048 {flag}"
    imported = read_command(None, [words])
    assert {each.key for each in imported.notes} & {"config", flag} == notes
    assert ("program" in imported.data["train"]) == (flag in notes)


def test_a_command_with_a_toml_file_of_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("8b.toml").write_text(TOML)
    words = "srun torchrun --nnodes 2 --nproc_per_node 8 train.py --job.config_file 8b.toml --training.seq_len 4096"
    words += " --parallelism.tensor_parallel_degree 4 --compile.enable=true"
    imported = read_command(None, [words], chip="H100-SXM")
    train, program = imported.data["train"], imported.data["train"]["program"]
    assert (train["engine"], train["seq_length"], train["global_batch_size"]) == ("torchtitan", 4096, 3 * 4)
    assert program["knobs"]["activation_checkpointing"]["flag"] == "--activation_checkpoint.mode"
    engine = TORCHTITAN.with_program(program)
    space = engine.usual_space(task(engine="torchtitan", command=tuple(train["command"])))
    values = {name: space[name][0] for name in ("tensor_model_parallel_size", "micro_batch_size")}
    assert values == {"tensor_model_parallel_size": 4, "micro_batch_size": 3}
    assert space["activation_checkpointing"] == ("full",)
    assert imported.data["model"] == "meta-llama/Meta-Llama-3-8B"
    assert train["command"][-1] == "--parallelism.data_parallel_shard_degree=-1"


def test_keys_that_nothing_reads_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = "enable_cpu_offload = true\ngradient_accumulation_steps = 20\nmax_norm = 1.0\n[parallelism]"
    file = TOML.replace("[parallelism]", more).replace('mode = "full"', 'selective_ac_option = "op"')
    file += '[optimizer]\nname = "AdamW"\nstate_dtype = "bfloat16"\n[compile]\nenable = true\ncomponents = ["loss"]\n'
    Path("8b.toml").write_text(file)
    words = "torchrun --nproc_per_node 8 train.py --job.config_file 8b.toml --parallelism.expert_parallel_degree=1"
    imported = read_command(None, [f"{words} --training.own_flag 3"], chip="H100-SXM")
    effects = [each.key for each in imported.notes if "not predicted: " in each.text]
    assert {*", ".join(effects).split(", ")} == {
        *("training.enable_cpu_offload", "training.gradient_accumulation_steps", "optimizer.state_dtype"),
        *("compile.components", "training.own_flag"),
    }
    rows = imported.data["train"]["program"]["knobs"]
    assert rows["activation_checkpointing"] == {"flag": "--activation_checkpoint.mode"}


def test_options_of_a_trainer_that_change_the_job_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"train_batch_size": 64, "gradient_accumulation_steps": 2, "fp16": {"enabled": True}}
    Path("ds.json").write_text(json.dumps(config))
    words = "deepspeed --num_gpus 8 train.py --ds_config ds.json --model Qwen/Qwen3-8B --max_length 2048"
    words += " --per_device_train_batch_size 16 --use_lora true --load_in_4bit False --optim adamw_torch"
    notes = {each.key: each.text for each in read_command(None, [words]).notes}
    assert "16 contradicts 4" in notes["--per_device_train_batch_size"]
    assert "only adapters are trained" in notes["--use_lora"]
    assert "--load_in_4bit" not in notes


def test_what_a_command_leaves_open_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}')
    words = "deepspeed train.py --deepspeed ds.json --model Qwen/Qwen3-8B --max_length 2048"
    words += " --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
    imported = read_command(None, [words])
    notes = {each.key: each.text for each in imported.notes}
    assert imported.data["train"]["global_batch_size"] == 8
    assert "one replica" in notes["train.global_batch_size"]
    imported = read_command(None, [words.replace("train", "--num_gpus 8 train", 1)])
    notes = {each.key: each.text for each in imported.notes}
    assert "--per_device_train_batch_size" not in notes
    assert "one device" not in notes["train.global_batch_size"]


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"8B"', '"coreweave"\nhf_assets_path = "./hf/Llama-3.1-8B"', "model"),
        ('"8B"', '"70B_wide"\nhf_assets_path = "./hf/Llama-3.1-8B"', "model"),
        ("shard_degree = 8", "shard_degree = -2", "parallelism.data_parallel_shard_degree"),
        ("parallel_degree = 2", 'parallel_degree = "two"', "parallelism.tensor_parallel_degree"),
    ],
)
def test_a_toml_file_is_not_guessed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("8b.toml").write_text(TOML.replace(old, new, 1))
    with pytest.raises(SpecError) as refused:
        read_command(None, ["torchrun --nproc_per_node 8 train.py --job.config_file 8b.toml"], chip="H100-SXM")
    assert refused.value.key.endswith(key)


@pytest.mark.parametrize(
    ("launcher", "nodes", "noted"),
    [
        ("--nnodes= --nproc_per_node=8", 4, {"--nnodes", "cluster.nodes"}),
        ("--nproc_per_node=2", 1, {"parallelism"}),
        ("--nnodes=4 --nproc_per_node=8", 4, set[str]()),
    ],
)
def test_degrees_are_compared_with_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, nodes: int, noted: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("8b.toml").write_text(TOML.replace("shard_degree = 8", "shard_degree = 4\ndata_parallel_replicate_degree = 4"))
    imported = read_command(None, [f"torchrun {launcher} train.py --job.config_file 8b.toml"], chip="H100-SXM")
    assert imported.data["cluster"]["nodes"] == nodes
    assert {each.key for each in imported.notes} & {"--nnodes", "cluster.nodes", "parallelism"} == noted


def test_torchtitan_after_0_3_counts_the_tokens_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokens, length = "--training.num_tokens_per_microbatch_per_dp_rank", "--training.max_context_length"
    start = f"torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b {length} 4096 {tokens}"
    data = read_command(None, [f"{start} 12288 --training.num_tokens_per_train_step 196608"]).data
    assert (data["train"]["seq_length"], data["train"]["global_batch_size"]) == (4096, 48)
    row = data["train"]["program"]["knobs"][MBS]
    assert (row["flag"], row["default"], row["values"]["12288"]) == (tokens, "12288", 3)
    with pytest.raises(SpecError, match=r"multiple of 4096"):
        read_command(None, [f"{start} 5000"])


@pytest.mark.parametrize("name", TABLES["titan_registry"])
def test_each_configuration_of_torchtitan_has_a_known_model(name: str) -> None:
    found = read_command(None, [f"torchrun --nproc_per_node 8 -m torchtitan.train --module m --config {name}"])
    assert public_models()[found.data["model"]]


def test_sizes_in_python_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config"
    known = read_command(None, [f"{start} llama3_70b"]).data
    assert (known["train"]["seq_length"], known["train"]["global_batch_size"]) == (8192, 8)
    defaults = {name: row["default"] for name, row in known["train"]["program"]["knobs"].items()}
    assert defaults == {MBS: 8, TP: 8, AC: "full"}
    before_0_3 = read_command(None, [f"{start} llama3_8b --activation_checkpoint.mode=full"]).data
    row = before_0_3["train"]["program"]["knobs"][AC]
    assert (row["flag"], row["default"]) == ("--activation_checkpoint.mode", "full")
    words = f"{start} my_llama3_8b --model.name llama3 --model.flavor 8B"
    with pytest.raises(SpecError, match=r"training\.seq_len"):
        read_command(None, [words])
    words += " --training.seq_len 8192 --training.local_batch_size 2"
    for shards in ("", " --parallelism.data_parallel_shard_degree -1"):
        data = read_command(None, [words + shards]).data
        assert (data["train"]["global_batch_size"], data["cluster"]["devices_per_node"]) == (16, 8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("Qwen/Qwen3-30B-A3B", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("zai-org/GLM-4.5-Air", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("Qwen/Qwen3-8B", None),
    ],
)
@pytest.mark.parametrize("framework", ["llamafactory-cli train", "axolotl train"])
def test_all_linear_layers_of_a_framework_are_those_with_a_name(
    framework: str, model: str, targets: set[str] | None, folder: Path
) -> None:
    text = "stage: sft\nfinetuning_type: lora\nmodel_name_or_path: "
    if framework.startswith("axolotl"):
        text = "adapter: lora\nlora_target_linear: true\nbase_model: "
    (folder / "lora.yaml").write_text(text + model)
    (folder / "job.sh").write_text(f"CUDA_VISIBLE_DEVICES=0 {framework} lora.yaml\n")
    found = read_command(None, ["job.sh"], chip="H100-SXM").data["train"]["adapter"]
    assert (set(found["targets"]) if "targets" in found else None) == targets


@pytest.mark.parametrize(
    ("model", "given", "targets"),
    [
        ("deepseek-ai/DeepSeek-V3", "q_proj,k_proj,v_proj,o_proj", ["o_proj"]),
        ("deepseek-ai/DeepSeek-V3", "q_a_proj,kv_b_proj", ["q_proj", "v_proj"]),
        ("deepseek-ai/DeepSeek-V2-Lite", "q_proj,v_proj", ["q_proj"]),
        ("mistralai/Mixtral-8x7B-v0.1", "q_proj,gate_proj,up_proj,down_proj", ["q_proj"]),
        ("LiquidAI/LFM2-8B-A1B", "q_proj,o_proj,out_proj,gate_proj", ["q_proj", "out_proj"]),
        ("mistralai/Mixtral-8x7B-v0.1", "q_proj,w1,w2,w3", ["q_proj", "gate_proj", "down_proj", "up_proj"]),
    ],
)
def test_layers_that_a_model_has_by_other_names_have_no_adapters(
    model: str, given: str, targets: list[str], folder: Path
) -> None:
    text = f"stage: sft\nfinetuning_type: lora\nmodel_name_or_path: {model}\nlora_target: {given}\n"
    (folder / "lora.yaml").write_text(text)
    (folder / "job.sh").write_text("CUDA_VISIBLE_DEVICES=0 llamafactory-cli train lora.yaml\n")
    found = read_command(None, ["job.sh"], chip="H100-SXM")
    assert found.data["train"]["adapter"]["targets"] == targets
    named = [note for note in found.notes if "by other names" in note.text]
    assert bool(named) == (len(targets) < given.count(",") + 1)


@pytest.mark.parametrize(
    ("further", "base"),
    [("", "fp32"), ("--dtype bfloat16", None), ("--load_in_4bit", "nf4"), ("--deepspeed zero3.json", None)],
)
def test_trl_loads_weights_in_fp32_unless_told_otherwise(further: str, base: str | None, folder: Path) -> None:
    words = "trl sft --model_name_or_path Qwen/Qwen3-8B --dataset_name x --max_length 1024 --packing --use_peft"
    (folder / "job.sh").write_text(f"CUDA_VISIBLE_DEVICES=0 {words} {further}\n")
    found = read_command(None, ["job.sh"], chip="H100-SXM").data["train"]["adapter"]
    assert found.get("base") == base


@pytest.mark.parametrize(("target", "is_noted"), [("all", True), ("q_proj,out_proj", True), ("q_proj,in_proj", False)])
def test_layers_beside_which_peft_puts_no_adapter_are_noted(target: str, is_noted: bool, folder: Path) -> None:
    text = "model_name_or_path: nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B\nstage: sft\nfinetuning_type: lora\n"
    (folder / "lora.yaml").write_text(f"{text}lora_target: {target}\n")
    (folder / "job.sh").write_text("llamafactory-cli train lora.yaml\n")
    found = read_command(None, ["job.sh"], chip="H100-SXM").notes
    assert any("out_proj of nemotron_h" in note.text for note in found) == is_noted


def _axolotl(folder: Path, text: str) -> dict[str, Any]:
    """Return the data of a spec for a job of axolotl, with `text` in its configuration."""
    lines = "base_model: Qwen/Qwen3-Next-80B-A3B-Instruct\nsequence_len: 2048\nsample_packing: true\n"
    (folder / "own.yaml").write_text(f"{lines}{text}\n")
    return dict(read_command(None, ["axolotl train own.yaml"], chip="H100-SXM").data)


@pytest.mark.parametrize(
    ("text", "is_tiled"),
    [
        ("plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]", True),
        ("liger_fused_linear_cross_entropy: true", True),
        ("cut_cross_entropy: false", False),
        ("plugins: [axolotl.integrations.spectrum.SpectrumPlugin]", False),
    ],
)
def test_axolotls_fused_losses_never_have_all_logits(
    text: str, is_tiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = open_spec(_axolotl(tmp_path, text), None, (), plan=True).problem.platform.task.spec
    assert has_tiled_loss(spec) == is_tiled
    (tmp_path / "own.yaml").unlink()
    assert not has_tiled_loss(spec), "a plan on another machine, without the file"


@pytest.mark.parametrize(
    ("words", "is_tiled"),
    [
        ("--model Qwen/Qwen2.5-7B --use_liger_kernel true", True),
        ("--model Qwen/Qwen2.5-7B", False),
        ("--model Qwen/Qwen2.5-7B --use_liger_kernel true --enable_channel_loss true", False),
        ("--model Qwen/Qwen2.5-7B --use_liger_kernel true --sequence_parallel_size 2", False),
        ("--model zai-org/GLM-4.5-Air --use_liger_kernel true", False),  # glm4_moe is not among Liger's families
    ],
)
def test_the_fused_loss_of_liger_in_ms_swift(words: str, is_tiled: bool) -> None:
    command = f"swift sft --tuner_type full --max_length 8192 --deepspeed zero3 {words}"
    data = read_command(None, [f"NPROC_PER_NODE=4 {command}"], chip="A100-80GB").data
    assert has_tiled_loss(open_spec(data, None, (), plan=True).problem.platform.task.spec) == is_tiled


@pytest.mark.parametrize("preset", ["fsdp2", "zero3"])
def test_offloaded_activations_leave_two_checkpoints_on_the_device(preset: str) -> None:
    """trl 1.16 brings a checkpoint back while that of the layer before is still there: 30 of 32 are on the host."""
    words = f"trl sft --model_name_or_path meta-llama/Meta-Llama-3.1-8B --max_length 32768 --accelerate_config {preset}"
    peaks = []
    for further in ("", " --activation_offloading true"):
        data = read_command(None, [f"{words} --per_device_train_batch_size 1{further}"], chip="H100-SXM").data
        platform = open_spec(data, None, (), plan=True).problem.platform
        values = {**{knob.name: knob.neutral for knob in platform.engine.knobs}, **data["auto_tuner"]["baseline"]}
        row = {knob.name: np.array([knob.axis(()).encode(values[knob.name])]) for knob in platform.engine.knobs}
        peaks.append(platform.engine.predict(platform.task, row, platform.costs).peak_allocated_bytes[0])
    assert peaks[0] - peaks[1] == pytest.approx(30 * 32768 * 4096 * 2)


@pytest.mark.parametrize("layers", ["", "lora_target_modules: [q_proj]\n", "lora_target_linear: true\n"])
def test_parameters_of_experts_have_adapters(layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"adapter: lora\n{layers}lora_target_parameters: [experts.gate_up_proj, experts.down_proj, mlp.gate.weight]"
    targets = _axolotl(tmp_path, text)["train"]["adapter"]["targets"]
    assert targets[-2:] == ["experts.gate_up_proj", "experts.down_proj"]
    assert ("q_proj" in targets, "in_proj" in targets) == ("q_proj" in layers or "linear" in layers, "linear" in layers)
    with pytest.raises(SpecError, match="lora_target_parameters"):
        _axolotl(tmp_path, f"{text}\nlora_dropout: 0.05")


@pytest.mark.parametrize(
    ("text", "checkpoints"),
    [
        ("adapter: lora\nactivation_offloading: true", "none"),
        ("adapter: lora\ngradient_checkpointing: offload", "none"),
        ("adapter: lora\nactivation_offloading: hidden_states", "full"),
        ("adapter: lora\nactivation_offloading: false", "full"),
        ("activation_offloading: true", "full"),
    ],
)
def test_axolotl_offloads_instead_of_checkpoints_beside_adapters(
    text: str, checkpoints: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text += "\ngradient_checkpointing: true" * ("gradient_checkpointing" not in text)
    data = _axolotl(tmp_path, text)
    assert data["auto_tuner"]["baseline"].get(AC, "none") == checkpoints
    platform = open_spec(data, None, (), plan=True).problem.platform
    axes = {axis.knob: axis for axis in platform.engine.axes(platform.task)}
    assert len({*axes[AC].values}) == (1 if checkpoints == "none" else 2)


OPENRLHF = "--pretrain {} --max_len 512 --train_batch_size 64 --micro_train_batch_size 2"
"""Sizes in the words of OpenRLHF before 0.11."""


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        (f"{OPENRLHF} --zero_stage 3 --adam_offload", 3),
        ("--model.model_name_or_path {} --data.max_len 512 --train.batch_size 64 --train.micro_batch_size 2", 2),
        (f"{OPENRLHF} --lora_rank 16", 2),
    ],
)
def test_sft_of_openrlhf_is_a_job_of_deepspeed(sizes: str, zero: int) -> None:
    command = f"deepspeed --num_gpus 4 --module openrlhf.cli.train_sft {sizes.format('Qwen/Qwen3-4B')} --own_key 3"
    imported = read_command(None, [command], chip="H100-SXM")
    train, baseline = imported.data["train"], imported.data["auto_tuner"]["baseline"]
    assert (train["engine"], train["seq_length"], train["global_batch_size"]) == ("deepspeed", 512, 64)
    assert (baseline["zero_stage"], baseline["micro_batch_size"]) == (zero, 2)
    assert baseline["offload_optimizer"] == ("cpu" if "adam_offload" in sizes else "none")
    assert train.get("adapter", {}).get("rank") == (16 if "lora_rank" in sizes else None)
    assert "own_key" in " ".join(map(str, imported.notes))


def test_plugins_that_no_table_knows_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = "[own.FastPlugin, axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin, other.LeanPlugin]"
    (tmp_path / "own.yaml").write_text(f"base_model: Qwen/Qwen3-0.6B\nsequence_len: 2048\nplugins: {names}\n")
    notes = read_command(None, ["axolotl train own.yaml"], chip="H100-SXM").notes
    (found,) = [text for text in map(str, notes) if "Plugin" in text]
    assert "own.FastPlugin" in found
    assert "other.LeanPlugin" in found
    assert "CutCrossEntropy" not in found


def test_adapters_of_shared_experts_are_none_of_routed_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT compares the ends of paths: mlp.shared_expert.up_proj is no layer of routed experts."""
    monkeypatch.chdir(tmp_path)
    text = "adapter: qlora\nload_in_4bit: true\nlora_target_modules: [q_proj, linear_attn.in_proj_qkvz, {}]"
    shared = _axolotl(tmp_path, text.format("shared_expert.up_proj, shared_experts.gate_proj"))
    assert shared["train"]["adapter"]["targets"] == ["q_proj", "in_proj"]
    routed = _axolotl(tmp_path, text.format("up_proj, gate_proj"))
    assert routed["train"]["adapter"]["targets"] == ["q_proj", "in_proj", "up_proj", "gate_proj"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("adapter: qlora", "adapter"),
        ("adapter: qlora\nload_in_4bit: true\nload_in_8bit: true", "adapter"),
        ("adapter: lora\nquantize_moe_experts: true", "quantize_moe_experts"),
        ("adapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true\nlora_target_linear: true",
         "quantize_moe_experts"),
    ],
)  # fmt: skip
def test_what_axolotl_refuses_together_is_refused(
    text: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as refused:
        _axolotl(tmp_path, text)
    assert refused.value.key == key


def test_fp8_and_the_optimizer_of_ms_swift_on_megatron_are_its_settings() -> None:
    words = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-14B --max_length 8192 --packing true "
    words += "--fp8_format e4m3 --fp8_recipe blockwise --fp8_param_gather true --optimizer dist_muon"
    settings = read_command(None, [words]).data["train"]["settings"]
    given = {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True, "optimizer": "dist_muon"}
    assert {name: settings[name] for name in given} == given
