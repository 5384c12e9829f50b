import json
from collections.abc import Callable
from pathlib import Path

import pytest
from flagcore_testing.toy import KNOBS

from flagcore.domain.model import Model
from flagcore.domain.spec import ClusterSpec, Control, Spec, TrainSpec
from flagcore.errors import SpecError
from flagcore.spec import schema
from flagcore.spec.convert import parse_spec
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import spec_as_data
from tests.checks import given, refuses
from tests.spec.conftest import TRAIN, read_spec
from tests.tasks import ENGINES, SHAPE

Read = Callable[..., Spec]
ReadError = Callable[..., SpecError]


def test_missing_keys_have_the_defaults_of_the_domain(read: Read) -> None:
    spec = read()
    assert spec.model == Model(
        name="inline",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        vocab_size=1000,
    )
    assert spec.train == TrainSpec(engine="toy", seq_length=128, global_batch_size=8, precision="bf16")
    assert (spec.cluster, spec.control, spec.baseline, spec.envs) == (ClusterSpec(), Control(), None, {})
    assert (spec.objective, spec.strategy, spec.launcher) == ("tokens_per_second_per_device", "learned", "local")


def test_space_always_has_all_knobs_of_the_engine(read: Read) -> None:
    assert set(read().space) == {knob.name for knob in KNOBS if knob.searchable}
    assert set(read().space.values()) == {"auto"}


def test_space_takes_a_value_a_list_or_auto_without_duplicates(read: Read) -> None:
    space = read(
        "auto_tuner: {space: {tensor_model_parallel_size: [2, 1, 2], micro_batch_size: 4,"
        " use_distributed_optimizer: auto,"
        " use_recompute: [true, false, true], recompute_method: uniform}}"
    ).space
    assert space["tensor_model_parallel_size"] == (2, 1)
    assert space["micro_batch_size"] == (4,)
    assert space["use_distributed_optimizer"] == "auto"
    assert space["use_recompute"] == (True, False)
    assert space["recompute_method"] == ("uniform",)


def test_baseline_contains_only_the_knobs_that_are_set(read: Read) -> None:
    knobs = "{tensor_model_parallel_size: 2, use_recompute: true, recompute_method: null}"
    spec = read(f"auto_tuner: {{baseline: {knobs}}}")
    assert spec.baseline == {"tensor_model_parallel_size": 2, "use_recompute": True, "recompute_method": None}


def test_every_section_is_converted(read: Read) -> None:
    spec = read(
        """
cluster: {chip: example-80g, nodes: 2, devices_per_node: 8, memory_per_device: 1.5GiB}
auto_tuner:
  control: {train_iters: 6, warmup_iters: 2, max_time_per_task: 60, max_time: 1e3, max_trials: 9, run_best: true}
  objective: step_time_s
  strategy: mine
  launcher: far
envs: {WORD: on, NUMBER: 8}
action: auto_tune
""",
        train="train: {engine: toy, seq_length: 8, global_batch_size: 4, precision: fp8, command: [bash, x]}\n",
    )
    assert spec.cluster == ClusterSpec(
        chip="example-80g", nodes=2, devices_per_node=8, memory_bytes_per_device=3 * 2**29
    )
    assert spec.control == Control(
        train_iters=6, warmup_iters=2, max_time_per_task=60.0, max_time=1000.0, max_trials=9, run_best=True
    )
    assert (spec.objective, spec.strategy, spec.launcher) == ("step_time_s", "mine", "far")
    assert spec.envs == {"WORD": "on", "NUMBER": "8"}
    assert spec.train.command == ("bash", "x")


@pytest.mark.parametrize(
    ("written", "size"),
    [("4GiB", 4 << 30), ("80 GB", 80 * 10**9), ("60G", 60 * 10**9), ("1048576", 1 << 20), ("2097152B", 2 << 20)],
)
def test_memory_is_read_in_binary_and_decimal_units(read: Read, written: str, size: int) -> None:
    assert read(f"cluster: {{memory_per_device: {written}}}").cluster.memory_bytes_per_device == size


@pytest.mark.parametrize(("written", "seconds"), [("600ms", 0.6), ("2h", 7200.0), ("1.5 min", 90.0), ("60", 60.0)])
def test_durations_and_rates_may_have_units(read: Read, written: str, seconds: float) -> None:
    network = "cluster: {nic_bytes_per_second: 400Gbit/s, nic_latency_seconds: 5us}"
    spec = read(f"auto_tuner: {{control: {{max_step_time: {written}, device_wait: 0s}}}}\n{network}")
    assert (spec.control.max_step_time, spec.control.device_wait) == (pytest.approx(seconds), 0.0)
    assert spec.cluster.nic_bytes_per_second == 5e10
    assert spec.cluster.nic_latency_seconds == pytest.approx(5e-6)


def test_a_trial_may_run_on_fewer_hosts(read: Read, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb\nc\n")
    cluster = read("cluster: {hostfile: hosts, nodes: 2}").cluster
    assert (cluster.hosts, cluster.nodes) == (("a", "b", "c"), 2)


def test_hostfile_gives_hosts_nodes_and_devices(read: Read, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nnode-a slots=8 type=x\n\nnode-b slots=8 type=x  # second\n")
    cluster = read("cluster: {hostfile: hosts}").cluster
    assert (cluster.hosts, cluster.nodes, cluster.devices_per_node) == (("node-a", "node-b"), 2, 8)
    cluster = read("cluster: {hostfile: hosts, spares: 1}").cluster
    assert (cluster.hosts, cluster.nodes, cluster.spares) == (("node-a", "node-b"), 1, 1)
    with refuses("cluster.spares", 2):
        read("cluster: {hostfile: hosts, spares: 2}")


@pytest.mark.parametrize("types", [("", ""), (" type=A", " type=B")])
def test_a_host_file_may_name_users(read: Read, tmp_path: Path, types: tuple[str, str]) -> None:
    (tmp_path / "hosts").write_text(f"ann@node-a slots=8{types[0]}\nnode-b slots=8{types[1]}\n")
    cluster = read("cluster: {hostfile: hosts, host_envs: {ann@node-a: {X: '1'}, node-b: {X: '2'}}}").cluster
    assert (cluster.hosts, cluster.users) == (("node-a", "node-b"), {"node-a": "ann"})
    assert cluster.host_envs == {"node-a": {"X": "1"}, "node-b": {"X": "2"}}


@pytest.mark.parametrize(
    ("lines", "key", "problem"),
    [
        ("", "cluster.hostfile", "names no host"),
        ("a slots=8\nb slots=4", "line 2", "differs in slots"),
        ("a slots=8\na slots=8", "line 2", "repeats a host"),
        ("x@a slots=8\ny@a slots=8", "line 2", "repeats a host"),
        ("-oProxyCommand=x@a", "line 1", "does not start with the name of a host"),
        ("@a", "line 1", "does not start with the name of a host"),
        ("a slots=8\n\nb slots=x", "line 3", "slots from 1"),
        ("a gpus=8", "line 1", "other text than slots"),
        ("-oProxyCommand=x", "line 1", "does not start with the name of a host"),
        ("\n".join(f"n{i}" for i in range(20_000)) + "\nn7", "line 20001", "repeats a host"),  # not in quadratic time
    ],
)
def test_bad_hostfile_is_refused_with_its_line(
    read_error: ReadError, tmp_path: Path, lines: str, key: str, problem: str
) -> None:
    (tmp_path / "hosts").write_text(lines)
    error = read_error("cluster: {hostfile: hosts}")
    assert error.key == key
    assert problem in error.problem
    assert error.file == str(tmp_path / "hosts")


def test_hostfile_and_spec_must_agree(read_error: ReadError, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    assert read_error("cluster: {hostfile: hosts, nodes: 3}").key == "cluster.nodes"
    assert read_error("cluster: {hostfile: hosts, devices_per_node: 4}").key == "cluster.devices_per_node"
    assert read_error("cluster: {hostfile: nowhere}").key == "cluster.hostfile"
    assert read_error("cluster: {hostfile: hosts, host_envs: {other: {A: 1}}}").key == "cluster.host_envs.other"
    assert read_error("cluster: {host_envs: {other: {A: 1}}}").key == "cluster.host_envs.other"


def test_raw_data_is_stored_and_serializable(read: Read, tmp_path: Path) -> None:
    spec = read("envs: {A: 1, B: on}")
    data = spec_as_data(tmp_path / "spec.yaml")
    assert data["envs"] == {"A": 1, "B": "on"}
    assert parse_spec(json.loads(json.dumps(data)), file="again", base=tmp_path, engines=ENGINES) == spec


def test_spec_may_be_json(tmp_path: Path, read: Read) -> None:
    expected = read()
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec_as_data(tmp_path / "spec.yaml")))
    assert read_spec(path) == expected


def test_groups_of_a_cluster_are_read_in_their_order(read: Callable[..., Spec]) -> None:
    groups = (
        "{chip: a, nodes: 2, devices_per_node: 8}, {chip: b, memory_per_device: 1GiB, nic_bytes_per_second: 5.0e+9}"
    )
    assert read(f"cluster: {{groups: [{groups}]}}").cluster == ClusterSpec(
        groups=(
            ClusterSpec(chip="a", nodes=2, devices_per_node=8),
            ClusterSpec(chip="b", memory_bytes_per_device=1 << 30, nic_bytes_per_second=5e9),
        )
    )


def test_one_group_is_a_cluster_of_equal_nodes(read: Callable[..., Spec]) -> None:
    assert read("cluster: {groups: [{chip: a, nodes: 2}]}").cluster == ClusterSpec(chip="a", nodes=2)


@pytest.mark.parametrize("source", ["groups", "hostfile"])
def test_a_cluster_has_at_most_16_groups(read: Read, read_error: ReadError, tmp_path: Path, source: str) -> None:
    def cluster(count: int) -> str:
        names = [f"c{number}" for number in range(count)]
        (tmp_path / "hosts").write_text("".join(f"{name} slots=8 type={name}\n" for name in names))
        groups = json.dumps([{"chip": name} for name in names])
        return "cluster: {hostfile: hosts}" if source == "hostfile" else f"cluster: {{groups: {groups}}}"

    assert len(read(cluster(16)).cluster.groups) == 16
    error = read_error(cluster(17))
    assert (error.key, error.value) == ("cluster.groups", 17)


def test_a_missing_file_gets_similar_names_as_suggestions(tmp_path: Path) -> None:
    (tmp_path / "train-cpu.yaml").write_text("{}")
    with pytest.raises(SpecError, match=r"does not exist; did you mean .*train-cpu\.yaml\?"):
        read_spec(tmp_path / "trian-cpu.yaml")
    for other in ("nope.yaml", "away/other.yaml"):  # an ending alone makes no names similar
        with pytest.raises(SpecError, match="does not exist; give the path"):
            read_spec(tmp_path / other)


def test_inline_shape_resolves_its_defaults() -> None:
    model = model_from(SHAPE | {"num_moe_experts": 4, "moe_router_topk": 2, "q_lora_rank": None}, base=Path())
    assert (model.num_query_groups, model.kv_channels, model.moe_ffn_hidden_size) == (4, 16, 128)


def test_all_rules_that_an_inline_shape_breaks_are_reported_once(error_of: ReadError) -> None:
    shape = SHAPE | {"hidden_size": 65}
    wrong = {"num_query_groups": 3, "moe_router_topk": 2, "kv_lora_rank": 3, "v_head_dim": 8}
    error = error_of(model_from, shape | wrong, base=Path())
    keys = {f"model.{key}": value for key, value in (shape | wrong).items() if key in {*wrong, "hidden_size"}}
    assert {each.key: each.value for each in error.problems} == keys
    assert len(error.problems) == len(keys)
    too_many = {"num_moe_experts": 10**9, "moe_router_topk": 2}
    assert error_of(model_from, shape | {"hidden_size": 64} | too_many, base=Path()).key == "model.num_moe_experts"
    without_topk = error_of(model_from, shape | {"hidden_size": 64, "num_moe_experts": 4}, base=Path())
    assert [each.key for each in without_topk.problems] == ["model.moe_router_topk"]


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ({"histogram": {"100": 3.0, "300": 1.0}}, [(100, 192), (300, 64)]),
        ({"mean": 500, "spread": 0}, [(500, 256)]),
        ({"file": "lengths.txt", "batching": "longest"}, [(7, 128), (9, 128)]),
        ({"file": "lengths.jsonl"}, [(7, 128), (9, 128)]),
    ],
)
def test_lengths_of_samples_become_quantiles(
    read: Read, tmp_path: Path, section: dict[str, object], values: list[tuple[int, int]]
) -> None:
    (tmp_path / "lengths.txt").write_text("9\n7\n")
    (tmp_path / "lengths.jsonl").write_text('{"text": "a", "length": 9}\n{"length": 7}\n')
    lengths = given(read(train=TRAIN.replace("}", f", lengths: {json.dumps(section)}}}", 1)).train.lengths)
    assert [(each, lengths.values.count(each)) for each in sorted(set(lengths.values))] == values


@pytest.mark.parametrize(
    ("section", "key", "problem"),
    [
        ({}, "", "has none"),
        ({"mean": 10, "file": "lengths.txt"}, "", "has mean, file"),
        ({"file": "missing.txt"}, ".file", "No such file"),
        ({"histogram": {"100": 0}}, ".histogram['100']", "must be"),
    ],
)
def test_lengths_without_one_readable_source_are_refused(
    read_error: ReadError, section: dict[str, object], key: str, problem: str
) -> None:
    error = read_error(train=TRAIN.replace("}", f", lengths: {json.dumps(section)}}}", 1))
    assert error.key == f"train.lengths{key}"
    assert problem in error.problem


def test_a_file_has_few_different_lengths(
    read: Read, read_error: ReadError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MOST_LENGTHS", 3)
    train = TRAIN.replace("}", ", lengths: {file: lengths.txt}}", 1)
    (tmp_path / "lengths.txt").write_text("7\n8\n9\n" * 5)
    assert {*given(read(train=train).train.lengths).values} == {7, 8, 9}
    (tmp_path / "lengths.txt").write_text("7\n8\n9\n10\n")
    assert read_error(train=train).key == "train.lengths.file"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("7\n\nseven\n", "in line 3"),
        ('{"length": 7}\n{"tokens": 7}\n', "in line 2"),
        ('{"length": 5.5}\n', "in line 1"),
        ('{"length": true}\n', "in line 1"),
        ("[7]\n", "in line 1"),
        ("7\n99999999999999999999\n", "in line 2"),
        ("0\n", "in line 1"),
        ("\n", "has no lengths"),
    ],
)
def test_files_of_lengths_are_refused_by_the_number_of_the_line(
    read_error: ReadError, tmp_path: Path, text: str, line: str
) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    error = read_error(train=TRAIN.replace("}", ", lengths: {file: lengths.txt}}", 1))
    assert error.key == "train.lengths.file"
    assert error.problem.endswith(line)


def test_keys_of_a_histogram_are_numbers_without_quotes(read: Read, read_error: ReadError) -> None:
    lengths = given(read(train=TRAIN.replace("}", ", lengths: {histogram: {100: 3, 300: 1}}}", 1)).train.lengths)
    assert set(lengths.values) == {100, 300}
    wrong = read_error(train=TRAIN.replace("}", ", lengths: {histogram: {0: 1}}}", 1))
    assert (wrong.key, wrong.value) == ("train.lengths.histogram", None)
    assert "at least 1" in wrong.problem
