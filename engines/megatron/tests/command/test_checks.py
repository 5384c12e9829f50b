"""Warnings and errors about a user's command before its first trial, and its arguments that are not predicted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.command import checks
from flagcore_megatron.command.launch import model_arguments, reference_launch
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.program.arguments import known_releases, release_table
from flagcore_megatron.program.user_command import SETTINGS, TABLES

from engines.megatron.tests.command.scripts import LAUNCH, spec_of
from flagcore.domain.spec import ClusterSpec, Spec
from flagcore.errors import SpecError
from tests.product import tasks


def spec(words: str, folder: Path, **changes: Any) -> Spec:
    (folder / "pretrain_gpt.py").touch()
    cluster = changes.pop("cluster", None) or ClusterSpec()
    found = spec_of(words.split(), folder, engine_version=changes.pop("release", "0.16.0"), **changes)
    return replace(found, cluster=cluster)


def refused(words: str, folder: Path, **changes: Any) -> list[tuple[str, object]]:
    with pytest.raises(SpecError) as error:
        ENGINE.ready(spec(words, folder, **changes))
    return [(problem.key, problem.value) for problem in error.value.problems]


REFUSED = {
    "values that argparse refuses": (
        f"{LAUNCH} --no-such-flag 3 --bf16 false --micro-batch-size two",
        ["--no-such-flag 3", "--bf16 false", "--micro-batch-size two"],
    ),
    "no such program": (LAUNCH.replace("pretrain_gpt.py", "pretrain_other.py"), ["{folder}/pretrain_other.py"]),
    "no value": (LAUNCH.replace("torchrun", "torchrun --master_addr --master_port"), ["--master_addr"]),
    "a model of a checkpoint": (
        "torchrun pretrain_gpt.py --use-checkpoint-args --load ck --micro-batch-size 1",
        ["--use-checkpoint-args"],
    ),
    "arguments of a file": (f"{LAUNCH} --yaml-cfg job.yaml", ["--yaml-cfg job.yaml"]),
    "FSDP without what it asserts": (
        f"{LAUNCH} --use-torch-fsdp2 --untie-embeddings-and-output-weights",
        ["--use-torch-fsdp2"],
    ),
    "adapters of a checkpoint": (f"{LAUNCH} --peft-type lora", ["--peft-type lora"]),
    "one process for four devices": (f"python {LAUNCH.split(maxsplit=3)[3]}", ["python pretrain_gpt.py"]),
    "other nodes than the cluster's": (LAUNCH.replace("torchrun", "srun torchrun --nnodes 4"), ["--nnodes 4"]),
    "one of two nodes": (LAUNCH, ["torchrun"]),
}
CLUSTERS = {
    "one process for four devices": ClusterSpec(devices_per_node=4),
    "other nodes than the cluster's": ClusterSpec(nodes=2),
    "one of two nodes": ClusterSpec(nodes=2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_command_that_can_only_fail_is_refused_before_any_trial(name: str, tmp_path: Path) -> None:
    words, values = REFUSED[name]
    release = "0.15.0+flagscale" if "--peft-type" in words else "0.16.0"
    expected = [("train.command", value.format(folder=tmp_path)) for value in values]
    assert refused(words, tmp_path, release=release, cluster=CLUSTERS.get(name)) == expected


def test_argument_of_another_release_is_refused(tmp_path: Path) -> None:
    words = f"{LAUNCH} --moe-flex-dispatcher-backend deepep"
    ENGINE.ready(spec(words, tmp_path))
    ((key, value),) = refused(words, tmp_path, release="0.12.0")
    assert (key, value) == ("train.command", "--moe-flex-dispatcher-backend deepep")


def test_argument_of_the_program_itself_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text('parser.add_argument("--of-my-own", type=int)\n')
    ENGINE.ready(spec(f"{LAUNCH} --of-my-own 3", tmp_path))
    fork = tmp_path / "fork" / "megatron" / "training"
    fork.mkdir(parents=True)
    (fork / "arguments.py").write_text("group.add_argument('--of-a-fork')\n")
    ENGINE.ready(spec(f"{LAUNCH} --of-a-fork", tmp_path, envs={"PYTHONPATH": "fork"}))


def test_other_release_than_the_trees_is_a_warning(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    of_tree = checks.spec_warnings(spec(f"{LAUNCH} --bf16", tmp_path))
    (line,) = set(checks.spec_warnings(spec(f"{LAUNCH} --bf16", tmp_path, release="0.12.0"))) - set(of_tree)
    assert "0.12.0" in line
    assert "0.16.1" in line


def test_setting_that_the_found_release_lacks_is_refused_before_any_trial(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\n")
    settings = {"use_megatron_fsdp": True, "delay_wgrad_compute": True}
    assert refused(LAUNCH, tmp_path, release=None, settings=settings) == [("train.settings.delay_wgrad_compute", True)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--bf16 --fp8-format hybrid", "--fp8-format"),
        ("--fp16", "--fp16"),
        ("--bf16 --hidden-size 96", "--hidden-size 96"),
        ("--bf16 --seq-length 4096", "--seq-length 4096"),
        ("--bf16 --global-batch-size 64", "--global-batch-size 64"),
        ("--bf16 --tensor-model-parallel-size 4", "--tensor-model-parallel-size"),
        ("--bf16 --tensorboard-dir {folde}", "{folde}, which stands for nothing"),
    ],
)
def test_contradiction_of_the_spec_is_a_warning(arguments: str, words: str, tmp_path: Path) -> None:
    found = spec(f"{LAUNCH} {arguments}", tmp_path)
    ENGINE.ready(found)
    assert any(words in line for line in checks.spec_warnings(found))


def test_command_that_agrees_with_the_spec_only_warns_of_its_knobs(tmp_path: Path) -> None:
    lines = checks.spec_warnings(spec(f"{LAUNCH} --bf16", tmp_path))
    (line,) = (line for line in lines if "engine_version" not in line)  # Python 3.13 installs a later release
    assert "--micro-batch-size" in line


def test_program_that_cannot_be_read_is_only_a_warning(tmp_path: Path) -> None:
    task = replace(tasks.task(), spec=spec("make train", tmp_path))
    assert checks.spec_warnings(task.spec) == []
    (line,) = checks.command_changes(tasks.platform(task), tasks.candidate(data_parallel_size=4))
    assert "train.command" in line


def test_environment_that_a_script_would_load_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"mkdir -p a\nmodule load cuda\n{LAUNCH}")
    task = replace(tasks.task(), spec=spec("bash run.sh", tmp_path))
    (text,) = checks.command_changes(tasks.platform(task), tasks.candidate(data_parallel_size=4))
    assert "module load cuda" in text
    assert "this shell" in text.splitlines()[-1]


def test_changes_are_printed_with_a_line_per_reason(tmp_path: Path) -> None:
    words = f"{LAUNCH} --save a --load b --bf16".replace("torchrun", "torchrun --master_port 29500")
    task = replace(tasks.task(), spec=spec(words, tmp_path))
    (text,) = checks.command_changes(tasks.platform(task), tasks.candidate(data_parallel_size=4))
    (checkpoints,) = [line for line in text.splitlines() if "--save" in line]
    assert "--load b" in checkpoints
    assert "--micro-batch-size" not in text
    assert "--master_port 29500 -> {master_port}" in text
    assert checks.command_changes(tasks.platform(tasks.task()), tasks.candidate(data_parallel_size=4)) == []


LATENT = replace(tasks.EXPERTS, **tasks.LATENT, q_lora_rank=24, moe_first_dense_layers=1, mtp_num_layers=1)


@pytest.mark.parametrize("model", [tasks.DENSE, tasks.EXPERTS, LATENT])
def test_command_without_the_users_has_all_arguments_of_the_model(model: Any) -> None:
    task = tasks.task(model, precision="bf16")
    launch = reference_launch(task, tasks.candidate(data_parallel_size=4).as_dict(), "/folder")
    assert launch.argv[:2] == ("torchrun", "--standalone")
    assert launch.missing
    words = launch.argv[launch.argv.index("pretrain_gpt.py") + 1 :]
    table = release_table("0.16.0")
    assert table.parse(words)[1] == []
    found = table.effective(words)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "vocab_size"):
        assert found[name] == getattr(model, name)
    assert found["bf16"] is True
    assert found["seq_length"] == found["max_position_embeddings"] == 128
    assert found.get("num_experts") == model.num_moe_experts
    assert found.get("multi_latent_attention", False) == model.multi_latent_attention
    assert ("moe_layer_freq" in found) == bool(model.moe_first_dense_layers)
    assert set(model_arguments(model)) <= set(words)


pytestmark = pytest.mark.together("megatron-core, imported")


def named(*words: str, envs: dict[str, str] | None = None, **settings: Any) -> list[str]:
    """The names of what is not predicted in a job with these arguments."""
    task = tasks.task(settings=settings)
    work = replace(task.spec.train, command=("torchrun", "pretrain_gpt.py", *words)) if words else task.spec.train
    task = replace(task, spec=replace(task.spec, work=work, envs=envs or {}))
    return [each.name for each in ENGINE.unmodelled(task)]


@pytest.mark.parametrize("release", [*known_releases()[-3:], f"{known_releases()[0]}+flagscale"])
def test_all_arguments_of_the_newest_releases_have_a_class(release: str) -> None:
    flags = [flag.lstrip("-") for flag in release_table(release).by_flag]
    assert SETTINGS.unclassed(flags) == []


def test_only_arguments_with_a_cost_have_conditions() -> None:
    names = [name for group in TABLES.values() for row in group.values() for name in row]
    costs = {name.rstrip("*") for name in SETTINGS.costs}
    assert [each for each in names if not any(cost.startswith(each.rstrip("*")) for cost in costs)] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--deterministic-mode", ["--deterministic-mode"]),
        ("--optimizer muon", ["--optimizer"]),
        ("--disable-mamba-mem-eff-path", []),
        ("--disable-mamba-mem-eff-path --hybrid-layer-pattern M-M*", ["--disable-mamba-mem-eff-path"]),
        ("--optimizer adam --adam-beta1 0.95 --lr 1e-4 --save here --log-interval 1", []),
        ("--window-size 128,0 --linear-num-key-heads 8 --dsa-indexer-topk-freq 2", ["--dsa-indexer-topk-freq"]),
        ("--rotary-base 500000 --mlp-chunks-for-training 1", []),
        ("--no-masked-softmax-fusion --attention-softmax-in-fp32", []),
        ("--no-masked-softmax-fusion --transformer-impl local", ["--no-masked-softmax-fusion"]),
        ("--no-masked-softmax-fusion --transformer-impl local --use-flash-attn", []),
        ("--no-bias-gelu-fusion --swiglu", []),
        ("--megatron-fsdp-grad-comm-dtype bf16", []),
        ("--megatron-fsdp-grad-comm-dtype bf16 --use-megatron-fsdp", ["--megatron-fsdp-grad-comm-dtype"]),
        ("--moe-router-fusion", []),
        ("--no-such-argument 4", ["--no-such-argument"]),
        ("--use-fused-rmsnorm --reuse-fp32-param", ["--reuse-fp32-param"]),  # of MindSpeed-LLM
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --stage sft --lora-r 8", []),
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_next_spec layer_spec --stage dpo", ["--stage", "--spec"]),
        ("--checkpoint-activations", ["--checkpoint-activations"]),
        ("--sft --reset-attention-mask", ["--sft", "--reset-attention-mask"]),
        ("--hierarchical-context-parallel-sizes 2 4", ["--hierarchical-context-parallel-sizes"]),
    ],
)
def test_arguments_that_change_cost_are_named_where_they_do_something(words: str, expected: list[str]) -> None:
    assert named(*words.split()) == expected


def test_settings_and_variables_are_named() -> None:
    assert named(optimizer="sgd", pipeline_schedule="zb-h1") == ["train.settings.optimizer"]
    envs = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_DEBUG_LEVEL": "2", "FLA_TRIL_PRECISION": "tf32"}
    assert named(envs=envs) == ["NVTE_FLASH_ATTN"]
