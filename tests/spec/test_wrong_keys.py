"""What is wrong in a spec is reported with its key, also in files that were made to do harm."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.knob import Effect, Knob
from flagcore.errors import SpecError
from flagcore.spec.convert import parse_spec
from flagcore.spec.plain_data import spec_error
from flagcore.spec.validate import MAX_PROBLEMS
from tests.spec.conftest import read_spec
from tests.tasks import ENGINES, SHAPE

ReadError = Callable[..., SpecError]
SPACE = "auto_tuner.space."
CONTROL = "auto_tuner.control."
UNKNOWN = "is not a known key"


@pytest.mark.parametrize(
    ("more", "key", "problem", "fix"),
    [
        ("modle: x", "modle", UNKNOWN, "did you mean model?"),
        ("max_trials: 3", "max_trials", UNKNOWN, "it belongs under auto_tuner.control"),
        ("cluster: {node: 1}", "cluster.node", UNKNOWN, "did you mean nodes?"),
        ("cluster: {groups: [{chip: a}, {chip: b, node: 1}]}", "cluster.groups[1].node", UNKNOWN, "mean nodes?"),
        ("cluster: {gpus: 8}", "cluster.gpus", UNKNOWN, "did you mean devices_per_node?"),
        ("auto_tuner: {control: {warm-it: 1}}", "auto_tuner.control.warm-it", UNKNOWN, "did you mean warmup_iters?"),
        ("cluster: {type: x}", "cluster.type", UNKNOWN, "did you mean chip?"),
        ("cluster: {groups: [{chip: a, spares: 1}]}", "cluster.groups[0].spares", UNKNOWN, "it belongs under cluster"),
        ("auto_tuner: {space: {tensor_parallel_size: 2}}", SPACE + "tensor_parallel_size", UNKNOWN, "tensor_model"),
        ("auto_tuner: {algo: {name: grid}}", "auto_tuner.algo", UNKNOWN, "known keys: strategy, launcher, space"),
        ("action: autotune", "action", "must be auto_tune", "did you mean auto_tune?"),
        ("cluster:", "cluster", "is null but must be auto or a mapping", "remove the key"),
        ("cluster: {nodes: 1000000, devices_per_node: 8}", "cluster.nodes", "at most 1000000 devices", "use 125000"),
        ("cluster: {devices_per_node: 1025}", "cluster.devices_per_node", "from 1 to 1024", ""),
        ("cluster: {devices_per_node: atuo}", "cluster.devices_per_node", "auto or a whole", "did you mean auto?"),
        ("cluster: {memory_per_device: 4gib}", "cluster.memory_per_device", "such as 4GiB", "did you mean 4GiB?"),
        ("cluster: {memory_per_device: 9999TiB}", "cluster.memory_per_device", "from 1048576", ""),
        ("cluster: {groups: [{chip: auto}]}", "cluster.groups[0].chip", "must name a chip", "name the chip"),
        ("cluster: {chip: a, groups: [{chip: b}]}", "cluster.chip", "cluster.groups", "each group"),
        ("cluster: {nodes: 1, groups: [{chip: b}]}", "cluster.nodes", "cluster.groups", "each group"),
        ("cluster: {groups: [{chip: a, nodes: 600000}, {chip: b, nodes: 600000}]}", "cluster.groups", "at most 1", ""),
        ("envs: {A: true}", "envs.A", "must be a string", "quote it"),
        ("envs: {A B: x}", "envs['A B']", "not the name of an environment variable", ""),
        ("auto_tuner: {strategy: 5}", "auto_tuner.strategy", "must be a string", "quote it"),
        ("auto_tuner: {control: {warmup_iters: 5}}", CONTROL + "warmup_iters", "below train_iters = 5", "use 4"),
        ("auto_tuner: {space: {use_recompute: yes}}", SPACE + "use_recompute", "true", "write true without quotes"),
        ("auto_tuner: {space: {use_recompute: 1}}", SPACE + "use_recompute", "true", ""),
        ("auto_tuner: {space: {use_recompute: [true, 0]}}", SPACE + "use_recompute[1]", "true", ""),
        ("auto_tuner: {baseline: {micro_batch_size: auto}}", "auto_tuner.baseline.micro_batch_size", "a whole", ""),
        ("auto_tuner: {baseline: {micro_batch_size: [1]}}", "auto_tuner.baseline.micro_batch_size", "a whole", ""),
        ("auto_tuner: {baseline: {micro_batch_size: }}", "auto_tuner.baseline.micro_batch_size", "is null", ""),
    ],
)
def test_unknown_key_or_wrong_value_is_reported_with_rule_and_fix(
    read_error: ReadError, more: str, key: str, problem: str, fix: str
) -> None:
    error = read_error(more)
    assert error.key == key
    assert problem in f"{error.problem}; {error.fix}"
    assert fix in error.fix


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("precision: fp8, adapter: {kind: qlora}", "precision"),
        ("precision: bf16, lengths: {histogram: {8: 1}, spread: 0.5}", "lengths.spread"),
        ("precision: bf16, lengths: {file: lengths.txt}", "lengths.file"),
    ],
)
def test_keys_of_fine_tuning_that_do_not_fit_are_refused(
    read_error: ReadError, tmp_path: Path, more: str, key: str
) -> None:
    (tmp_path / "lengths.txt").write_text('{"length": 8}\n{"tokens": 9}\n')
    train = f"train: {{engine: toy, seq_length: 128, global_batch_size: 8, {more}}}\n"
    assert read_error("", train=train).key == f"train.{key}"


@pytest.mark.parametrize(
    ("value", "key", "fix"),
    [
        ("atuo", "", "did you mean auto?"),
        ("'8'", "", "write 8 without quotes"),
        ("8.0", "", "write 8"),
        ("", "", "remove the key"),
        ("0", "", ""),
        ("1000001", "", ""),
        ("[1, x]", "[1]", ""),
    ],
)
def test_a_parallel_size_must_be_an_integer(read_error: ReadError, value: str, key: str, fix: str) -> None:
    error = read_error(f"auto_tuner: {{space: {{tensor_model_parallel_size: {value}}}}}")
    assert error.key == SPACE + "tensor_model_parallel_size" + key
    assert "a whole number from 1 to 1000000" in error.problem
    assert fix in error.fix


@pytest.mark.parametrize("command", ["[]", "bash run.sh", "[bash, 1]", "['', a]"])
def test_command_is_a_list_of_words(read_error: ReadError, command: str) -> None:
    train = f"train: {{engine: toy, seq_length: 8, global_batch_size: 4, precision: bf16, command: {command}}}\n"
    assert read_error(train=train).key.startswith("train.command")


@pytest.mark.parametrize(
    ("more", "key", "problem"),
    [
        ("hidden_size: 66", "hidden_size", "divisible by num_attention_heads = 4"),
        ("num_layers: 1001", "num_layers", "from 1 to 1000"),
        ("num_query_groups: 3", "num_query_groups", "must divide num_attention_heads = 4"),
        ("num_moe_experts: 8", "moe_router_topk", "is missing"),
        ("moe_router_topk: 2", "moe_router_topk", "needs num_moe_experts"),
        ("num_moe_experts: 8, moe_router_topk: 9", "moe_router_topk", "from 1 to num_moe_experts = 8"),
        ("num_moe_experts: 8, moe_router_topk: 2, moe_first_dense_layers: 4", "moe_first_dense_layers", "below"),
        ("kv_lora_rank: 8", "kv_lora_rank", "needs multi_latent_attention"),
        ("multi_latent_attention: true, kv_lora_rank: 8", "qk_head_dim", "is missing"),
        ("architectures: llama", "architectures", "is not a known key"),
    ],
)
def test_an_impossible_shape_is_refused(read_error: ReadError, more: str, key: str, problem: str) -> None:
    name = more.partition(":")[0]
    shape = ", ".join(f"{known}: {size}" for known, size in SHAPE.items() if known != name)
    error = read_error(model=f"model: {{{shape}, {more}}}\n")
    assert error.key == f"model.{key}"
    assert problem in error.problem


@pytest.mark.parametrize("model", ["", "5", "''", "[a]", "nowhere", ".", "Qwen/Qwen3-9B", "x" * 300, "x" * 5000])
def test_a_missing_model_is_refused(read_error: ReadError, model: str) -> None:
    assert read_error(model=f"model: {model}\n").key == "model"


def test_missing_sections_are_reported(read_error: ReadError) -> None:
    missing, empty = read_error(model=""), read_error(model="model: {}\n")
    assert (missing.key, missing.fix.count("a mapping"), read_error(train="").key) == ("model", 1, "train")
    assert (empty.key, empty.problem) == ("model.num_layers", "is missing")


def test_every_problem_of_a_file_is_listed(read_error: ReadError) -> None:
    """Unknown keys first, then what is missing or of a wrong type; a misspelt key is not missing as well."""
    error = read_error(
        "auto_tuner: {control: {max_trial: 3, repeats: -1, max_time: '60'}, objectve: x}\nenvs: {A: true}\n",
        train="train: {engine: toy, seq_len: 128, global_batch_size: 0, precision: bf16}\n",
    )
    unknown = [
        ("train.seq_len", 128, "did you mean seq_length?"),
        ("auto_tuner.control.max_trial", 3, "did you mean max_trials?"),
        ("auto_tuner.objectve", "x", "did you mean objective?"),
    ]
    wrong = {
        ("train.global_batch_size", 0, ""),
        ("auto_tuner.control.repeats", -1, ""),
        ("auto_tuner.control.max_time", "60", "write 60 without quotes"),
        ("envs.A", True, "quote it"),
    }
    found = [(each.key, each.value, each.fix) for each in error.problems]
    assert (found[:3], {*found[3:]}) == (unknown, wrong)
    assert len({each.file for each in error.problems}) == 1


def test_a_size_with_an_unknown_unit_has_a_hint(read_error: ReadError) -> None:
    assert "80GB" in read_error("cluster: {memory_per_device: 80Gb}").fix
    for rate in ("400Gb/s", "400gbps"):
        assert "400Gbit/s" in read_error(f"cluster: {{nic_bytes_per_second: {rate}}}").fix
    assert "min" in read_error("auto_tuner: {control: {max_time: 2hours}}").fix
    assert "29" not in read_error("cluster: {memory_per_device: 29.0}").fix  # 29 bytes are no size either


def test_a_long_list_of_problems_is_cut(read_error: ReadError) -> None:
    error = read_error("".join(f"key{number}: 1\n" for number in range(100)))
    assert len(error.problems) == MAX_PROBLEMS + 1
    assert str(100 - MAX_PROBLEMS) in error.problems[-1].problem


def test_python_objects_are_bounded_too() -> None:
    loop: dict[str, Any] = {}
    loop["model"] = loop
    for data in (None, 5, [], {1: 2}, {"model": object()}, {"model": {1, 2}}, {"model": 1 << 9999}, loop):
        with pytest.raises(SpecError) as caught:
            parse_spec(data, file="here", base=Path(), engines=ENGINES)
        assert caught.value.file == "here"
        assert len(str(caught.value)) < 400


def test_a_long_rule_has_the_room_of_a_fix_that_is_missing() -> None:
    rule = "must be " + ", ".join(f"metric{number}" for number in range(60))
    alone, fixed = (spec_error("key", rule, value="x", fix=fix) for fix in ("", "choose one"))
    assert len(alone.problem) > len(fixed.problem) > 100
    assert len(str(alone)) < 400


def error_in(shape: dict[str, int], space: dict[str, Any], *plugin_knobs: Knob) -> SpecError:
    train = {"engine": "toy", "seq_length": 8, "global_batch_size": 2, "precision": "bf16"}
    data = {"model": shape, "train": train, "auto_tuner": {"space": space}}
    with pytest.raises(SpecError) as caught:
        parse_spec(data, file="a.yaml", base=Path(), engines=ENGINES, plugin_knobs=plugin_knobs)
    return caught.value


@pytest.mark.parametrize(
    ("called", "key"),
    [
        ("num_hidden_layers", "num_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_key_value_heads", "num_query_groups"),
        ("intermediate_size", "ffn_hidden_size"),
    ],
)
def test_a_key_under_another_tools_name_is_not_also_missing(called: str, key: str) -> None:
    shape = {called if name == key else name: size for name, size in {**SHAPE, "num_query_groups": 1}.items()}
    error = error_in(shape, {})
    assert (error.key, error.fix) == (f"model.{called}", f"did you mean {key}?")


@pytest.mark.parametrize(
    ("knob", "fix"),
    [
        ("tp", "did you mean tensor_model_parallel_size?"),
        ("tensor_parallel", "did you mean tensor_model_parallel_size?"),
        ("acme_graph_levels", "did you mean acme_graph_level?"),
        ("zzz", "acme_graph_level"),
    ],
)
def test_plugins_knobs_are_listed_for_an_unknown_name(knob: str, fix: str) -> None:
    assert error_in(SHAPE, {knob: 2}, Knob(name="acme_graph_level", effects={1: Effect()})).fix.endswith(fix)


GOOD = (
    "model: {num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 1000}\n"
    "train: {engine: toy, seq_length: 128, global_batch_size: 8, precision: bf16}\n"
)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)

TEXTS = {
    "empty": (b"", "file", "is empty"),
    "a list": (b"- 1", "the document", "must be a mapping"),
    "another encoding": (GOOD.encode("utf-16"), "file", "is not UTF-8"),
    "a NUL": (b"a: \0", "character 3", "control character"),
    "too large": (b"a: " + b"x" * (1 << 22), "file", "more than 4194304 bytes"),
    "a tab": (b"a:\n\t- 1", "line 2, column 1", "cannot be read as YAML"),
    "two documents": ((GOOD + "---\n" + GOOD).encode(), "line 3, column 1", "single document"),
    "unknown alias": (b"a: *" + b"x" * 9999, "line 1, column 4", "undefined alias"),
    "python object": (b"a: !!python/object/apply:os.system [x]", "line 1, column 4", "the tag"),
    "wrong tag": (b"a: !!int maybe", "the document", "a value is invalid"),
    "duplicate key": ((GOOD + "model: x\n").encode(), "line 3, column 1", "repeated"),
    "itself in a mapping": (b"&a a: &b {c: *b}", "a.c.c", "contains itself"),
    "alias bomb": (BOMB.encode(), "", "more than 100,000 values"),
    "deep lists": (b"a: " + b"[" * 10_000, "line 1", "nesting depth"),
    "5000 digits": (b"a: " + b"9" * 5000, "the document", "a value is invalid"),
    "4000 digits": (b"a: " + b"9" * 4000, "a", "too many digits"),
    "overflow": (b"a: 1e400", "a", "finite"),
    "control character": (b'a: "\\u0007"', "a", "control character"),
    "half a surrogate": (b'a: "\\ud800"', "line 1, column 7", "Unicode"),
    "no character": (b'a: "\\UFFFFFFFF"', "line 1, column 7", "Unicode"),
    "control character in a key": (b'"\\u001b[31m": 1', "the document", "control character"),
    "switch as a key": (b"true: 2", "line 1, column 1", "strings"),
    "number as a key, twice": (b"{1: 2, '1': 3}", "line 1, column 8", "repeated"),
    "list as a key": (b"? [1]\n: 2", "line 1, column 3", "strings"),
    "line break in a key": (b'"a\\nb": 1\n' + GOOD.encode(), "['a\\nb']", "not a known key"),
}


@pytest.mark.parametrize(("text", "key", "problem"), TEXTS.values(), ids=TEXTS)
def test_malicious_text_gives_a_one_line_error_quickly(
    tmp_path: Path, error_of: ReadError, text: bytes, key: str, problem: str
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(text)
    started = time.perf_counter()
    error = error_of(read_spec, path)
    assert time.perf_counter() - started < 10
    assert error.key.startswith(key)
    assert problem in error.problem
    assert error.file.endswith("spec.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (" ", "is empty"),
        ("[]", "must be a mapping"),
        ('{"a": 1,}', "cannot be read as JSON"),
        ('{"a": NaN}', "finite"),
        ('{"a": 1e999}', "finite"),
        ('{"a": 1, "a": 2}', "has the key 'a' twice"),
        (f'{{{", ".join(f""""k{n}": 1""" for n in range(40_000))}, "k39999": 2}}', "has the key 'k39999' twice"),
        ('{"a": ' * 100_000, "nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_malicious_json_gives_a_one_line_error(tmp_path: Path, error_of: ReadError, text: str, problem: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(text)
    assert problem in error_of(read_spec, path).problem


def test_a_special_file_is_refused_without_waiting(tmp_path: Path, error_of: ReadError) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert "not a regular file" in error_of(read_spec, tmp_path / "pipe").problem
    assert "not a regular file" in error_of(read_spec, Path("/dev/zero")).problem
    assert "not a regular file" in error_of(read_spec, tmp_path).problem
    assert "symbolic links" in error_of(read_spec, tmp_path / "loop").problem
    assert "does not exist" in error_of(read_spec, tmp_path / "nowhere").problem
    assert "too long" in error_of(read_spec, Path("x/" * 2500)).problem
    assert "not a path" in error_of(read_spec, Path("a\0b")).problem


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_spec(path).model.num_layers == 4
