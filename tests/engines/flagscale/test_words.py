"""Errors in a tree name the tree's key, in every part of flagcore."""

from pathlib import Path

import pytest
from flagcore_flagscale import FlagScale

from flagcore.errors import SpecError
from flagcore.spec.convert import parse_spec
from tests.small import ENGINES

read_tree = FlagScale().read_tree

SPACE = "experiment.auto_tuner.space"


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("train_dense", "train.data.tokenizer.vocab_size=many", "train.data.tokenizer.vocab_size = 'many'"),
        ("train_dense", "train.model.seq_length=0", "train.model.seq_length = 0 must"),
        ("train_dense", "train.model.num_query_groups=5", "train.model.num_query_groups = 5 must divide"),
        (
            "train_dense",
            "train.system.tensor_model_parallel_size=two",
            "train.system.tensor_model_parallel_size = 'two'",
        ),
        ("train_dense", f"{SPACE}.micro_batch_size=[4,a]", f"{SPACE}.micro_batch_size[1] = 'a'"),
        ("train_dense", f"{SPACE}.recompute_method=[blocky]", f"{SPACE}.recompute_method[0] = 'blocky'"),
        (
            "train_dense",
            "experiment.auto_tuner.control.max_time=soon",
            "experiment.auto_tuner.control.max_time = 'soon'",
        ),
        ("train_moe", "train.model.num_experts=-3", "train.model.num_experts = -3"),
        ("train_first", "train.model.multiple_of=x", "train.model.multiple_of = "),
        ("serve_vllm", "serve.0.engine_args.model=/nowhere", "serve[0].engine_args.model = '/nowhere' does not exist"),
        ("train_dense", "+experiment.envs={a-b: 1}", "experiment.envs.a-b is not the name"),
        ("serve_vllm", "serve.0.profile.num_prompts=x", "serve[0].profile.num_prompts = 'x'"),
    ],
)
def test_an_error_of_the_spec_names_the_key_of_the_tree(name: str, override: str, says: str) -> None:
    model = ("++serve.0.engine_args.model=model",) if name.startswith("serve") else ()
    with pytest.raises(SpecError) as caught:
        parsed(name, *model, override)
    assert str(caught.value).startswith(f"{name}/tune.yaml: {says}")


def parsed(name: str, *overrides: str) -> None:
    """Make a spec of a tree. Raises SpecError in the tree's words."""
    found = read_tree(Path(name), "tune", overrides)
    try:
        parse_spec(found.data, file=found.file, base=Path(), engines=ENGINES)
    except SpecError as error:
        raise found.translate_error(error) from None


def test_an_error_without_a_file_gets_the_file_of_the_tree() -> None:
    found = read_tree(Path("serve_vllm"), "tune")
    error = SpecError(key="auto_tuner.space.instances", problem="is no value", value=3)
    assert str(found.translate_error(error)) == f"serve_vllm/tune.yaml: {SPACE}.vllm.instance = 3 is no value"
    engine_args = SpecError(key="serve.engine_args.context_len", problem="is no value")
    assert (
        str(found.translate_error(engine_args))
        == "serve_vllm/tune.yaml: serve[0].engine_args.max_model_len is no value"
    )
    for other in (SpecError(key="model", problem="x", file="other"), SpecError(key="--chip", problem="x")):
        assert found.translate_error(other) is other


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("${oc.env:NO_SUCH_PATH}", "Environment variable 'NO_SUCH_PATH' not found"),
        ("${no.such.key}", "Interpolation key 'no.such.key' not found"),
        ("???", "Missing mandatory value"),
    ],
)
def test_a_key_that_is_needed_but_not_resolved_is_refused_with_the_reason(value: str, why: str) -> None:
    with pytest.raises(SpecError, match=r"serve\[0\].engine_args.model cannot be resolved: " + why):
        read_tree(Path("serve_vllm"), "tune", (f"serve.0.engine_args.model='{value}'",))
