"""What is no tree, or none that can be tuned, is refused in one line: the file, the tree's key and the fix."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from flagcore_flagscale import FlagScale

from flagcore.cli.main import flag
from flagcore.errors import SpecError
from flagcore.plugins import entry_points
from flagcore.spec.convert import parse_spec
from tests.product.tasks import ENGINES

read_tree = FlagScale().read_tree

BROKEN = {
    "no YAML": ("\nexperiment: [1,\n", r"tune\.yaml: line \d+ is not valid YAML"),
    "tab": ("\nmore:\n\tkey: 1\n", r"tune\.yaml: line \d+ is not valid YAML"),
    "twice": ("\naction: run\n", r"line \d+ is not valid YAML: .*duplicate key action"),
    "tag": ("\nkey: !!python/object/apply:os.system [ls]\n", "not valid YAML.*python/object"),
    "circle": ("\nkey: &a\n  key: *a\n", "contains itself"),
    "two documents": ("\n---\nkey: 1\n", "another document"),
    "no interpolation": ("\nkey: ${a b}\n", "key cannot be composed"),
    "odd key": ("\nkey: {null: 1}\n", "key cannot be composed: .*NoneType"),
    "latin-1": (b"\nkey: \xe9\n", "tune.yaml: the tree is not UTF-8 text"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_its_line_or_key(case: str) -> None:
    added, message = BROKEN[case]
    top = Path("train_dense", "tune.yaml")
    top.write_bytes(top.read_bytes() + (added if isinstance(added, bytes) else added.encode()))
    with pytest.raises(SpecError, match=message) as caught:
        read_tree(Path("train_dense"), "tune")
    assert "\n" not in str(caught.value)
    assert "hydra" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tun", "--config-name = 'tun' is not a file in train_dense; use tune"),
        ("train/small", "give the folder to --config-path"),
        ("", "is not a file in train_dense; use tune"),
    ],
)
def test_a_missing_top_file_gets_the_existing_ones_as_suggestions(name: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        read_tree(Path("train_dense"), name)


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("train_dense", "action=stop", "action"),
        ("train_dense", "no.such.key=1", r"add it: \+no\.such\.key=1"),
        ("train_dense", "+train.model.num_layers=1", "exists already; change it: train"),
        ("train_dense", "~train.model.nothing", "does not exist"),
        ("train_dense", "train=nothing", "train/nothing.yaml, which does not exist; use "),
        ("train_dense", "train.model.seq_length=1,2", r"auto_tuner\.space"),
        ("train_dense", "train.model.seq_length=choice(1,2)", r"auto_tuner\.space"),
        ("train_dense", "experiment.exp_name='a b", "is invalid"),
        ("serve_vllm", "serve[0].engine=vllm", "as serve.0"),
        ("train_dense", "experiment=5", "must be a mapping"),
        ("train_dense", "~train", "train is missing, but"),
        ("serve_vllm", "serve.0.engine={vllm: 1}", "not an engine"),
        ("train_dense", "~experiment", "experiment is missing"),
        ("train_dense", "experiment.auto_tuner=5", "must be a mapping"),
        ("train_dense", "~train.data.tokenizer.vocab_size", "vocab_size"),
        ("train_dense", "experiment.runner.nnodes=many", "nnodes"),
        ("train_dense", "experiment.task.type=rl", "task.type"),
        ("train_dense", "~experiment.task.entrypoint", "task.entrypoint"),
        ("train_dense", "experiment.task.backend=robotics", "task.backend"),
        ("train_dense", "train.data.tokenizer.vocab_size=xxx", "vocab_size = 'xxx' is a placeholder"),
        ("serve_pairs", "experiment.runner.deploy.prefill_decode_disaggregation=true", "prefill_decode"),
        ("serve_pairs", "+serve.0.engine_args.disaggregation_mode=prefill", "disaggregation_mode"),
        ("serve_vllm", "experiment.auto_tuner.engines=[tgi]", "tgi"),
        ("serve_vllm", "serve=[]", "serve"),
    ],
)
def test_a_tree_that_cannot_be_tuned_is_refused_in_one_line(name: str, override: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        read_tree(Path(name), "tune", (override,))
    assert "\n" not in str(caught.value)


def test_a_spec_together_with_a_tree_is_refused() -> None:
    done = CliRunner().invoke(flag, ["estimate", "spec.yaml", "--config-path", "train_dense", "--config-name", "tune"])
    assert done.exit_code == 2
    assert "spec.yaml" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("import", "flagscale", "train_dense", "--config-name", "tune"),
        ("import", "flagscale-history", "history.csv", "--spec", "spec.yaml"),
    ],
)
def test_without_the_extra_its_commands_name_it(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "installed", lambda group: {})
    done = CliRunner().invoke(flag, list(arguments))
    assert done.exit_code == 2
    assert 'pip install "flagcore[flagscale]"' in done.output


def test_an_import_that_gives_no_valid_spec_fails() -> None:
    arguments = ["train_dense", "--config-name", "tune", "++train.system.fp16=maybe", "-o", "out.yaml"]
    found = CliRunner().invoke(flag, ["import", "flagscale", *arguments])
    assert isinstance(found.exception, SpecError)
    assert (found.exception.exit_code, found.exception.value) == (2, "maybe")
    assert not Path("out.yaml").exists()


def test_a_json_config_of_an_old_flagscale_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "pretrain_7b.json").write_text('{"experiment": {}}')
    for name in ("pretrain_7b", "pretrain_7b.json"):
        with pytest.raises(SpecError, match="JSON config of FlagScale") as caught:
            read_tree(tmp_path, name)
        assert caught.value.key == "--config-name"


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
    error = SpecError(key="auto_tuner.space.instances", problem="is invalid", value=3)
    assert str(found.translate_error(error)) == f"serve_vllm/tune.yaml: {SPACE}.vllm.instance = 3 is invalid"
    engine_args = SpecError(key="serve.engine_args.context_len", problem="is invalid")
    assert (
        str(found.translate_error(engine_args)) == "serve_vllm/tune.yaml: serve[0].engine_args.max_model_len is invalid"
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
