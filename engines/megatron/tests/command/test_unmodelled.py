"""Arguments that change time or memory and are not predicted: all are classed, and named where they do something."""

from dataclasses import replace
from typing import Any

import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.program.arguments import known_releases, release_table
from flagcore_megatron.program.unmodelled import SETTINGS, TABLES

from tests.product import tasks

pytestmark = pytest.mark.together("megatron-core, imported")

NEWEST = (*known_releases()[-3:], f"{known_releases()[0]}+flagscale")


def named(*words: str, envs: dict[str, str] | None = None, **settings: Any) -> list[str]:
    """The names of what is not predicted in a job with these arguments."""
    task = tasks.task(settings=settings)
    work = replace(task.spec.train, command=("torchrun", "pretrain_gpt.py", *words)) if words else task.spec.train
    task = replace(task, spec=replace(task.spec, work=work, envs=envs or {}))
    return [each.name for each in ENGINE.unmodelled(task)]


@pytest.mark.parametrize("release", NEWEST)
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
