"""The engine `deepspeed`: the configuration of candidates, and rules."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_models.layers import layers_of, parameters
from flagcore_trainers import deepspeed
from flagcore_trainers.deepspeed import (
    AUTOTP,
    BUCKET,
    DEEPSPEED,
    HPZ,
    MICRO,
    OFFLOAD,
    OVERLAP,
    QUANTIZED,
    ULYSSES,
    ZERO,
)
from flagcore_trainers.fully_shard import AC
from flagcore_trainers.fully_shard.weights import modules_of_layers
from flagcore_trainers.meaning import layout_of, training, weights_of_rank
from flagcore_trainers.trainer import Trainer

from flagcore import api
from flagcore.contracts import Platform
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Adapter
from flagcore.errors import SpecError
from tests.checks import refuses
from tests.product.tasks import DENSE, EXPERTS, SHAPE, costs, task

CONFIG = """{"train_batch_size": 32, "gradient_accumulation_steps": 4,  // see "notes"
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}, "url": "http://a#b",
}"""


@pytest.mark.parametrize(
    "flags", [["--deepspeed", "--deepspeed_config", "ds.json"], ["--deepspeed=ds.json"], ["--ds_config", "ds.json"]]
)
def test_a_candidate_is_a_changed_copy_of_the_configuration(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "ds.json").write_text(CONFIG)
    job = task(engine="deepspeed", command=("deepspeed", "train.py", *flags), directory=str(tmp_path))
    assert isinstance(DEEPSPEED, Trainer)
    DEEPSPEED.ready(job.spec)
    values = {knob.name: knob.neutral for knob in DEEPSPEED.knobs}
    candidate = Candidate.of({**values, ZERO: 3, MICRO: 2, OFFLOAD: "cpu"})
    platform = Platform(task=job, engine=DEEPSPEED, costs=costs(job))
    (tmp_path / "0").mkdir()
    for for_real in (False, True):
        launch = DEEPSPEED.launch(platform, candidate, str(tmp_path / "0"), for_real=for_real)
        (path,) = (word.rpartition("=")[2] for word in launch.argv if word.endswith("candidate.json"))
        written = json.loads(Path(path).read_text())
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, OVERLAP: False, BUCKET: 500_000_000, HPZ: 1}
        zero |= dict.fromkeys(QUANTIZED, False)
        assert written["zero_optimization"] == zero
        assert written["train_micro_batch_size_per_gpu"] == 2
        assert (written["train_batch_size"], written["url"]) == (8, "http://a#b")
        assert written["gradient_accumulation_steps"] == (written["train_batch_size"] // 2) // job.cluster.devices
        assert written.get("steps_per_print") == (None if for_real else 1)
    assert (tmp_path / "ds.json").read_text() == CONFIG
    space = DEEPSPEED.usual_space(job)
    assert (space[ZERO], space[BUCKET]) == ((2,), (200_000_000,))


@pytest.mark.parametrize(
    ("zero", "flags", "warned"),
    [
        ({"offload_optimizer": {"device": "nvme"}}, "", ["offload_optimizer.device = 'nvme'", "1.4 times"]),
        ({"reduce_bucket_size": "auto", "stage": 1}, "--num_gpus 4", ["reduce_bucket_size = 'auto'"]),
        ({HPZ: 3}, "", ["train.command is not legal"]),  # on four devices
        ({}, "--include localhost:0,1,2", ["starts 3 processes"]),
    ],
)
def test_a_baseline_that_is_not_the_users_is_named(
    tmp_path: Path, zero: dict[str, Any], flags: str, warned: list[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    words = ("deepspeed", *flags.split(), "train.py", "--deepspeed", "ds.json")
    lines = DEEPSPEED.task_warnings(task(engine="deepspeed", command=words, directory=str(tmp_path)))
    assert all(text in line for text, line in zip(warned, lines, strict=True))


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('{"train_batch_size": }', "train.program.config"),
        ('{"zero_optimization": [1]}', "train.program.config"),
        ('{"gradient_accumulation_steps": "two"}', "gradient_accumulation_steps"),
    ],
)
def test_a_broken_configuration_is_reported(tmp_path: Path, content: str, key: str) -> None:
    (tmp_path / "ds.json").write_text(content)
    with refuses(key):
        DEEPSPEED.ready(task(engine="deepspeed", command=("x", "--deepspeed", "ds.json"), directory=str(tmp_path)).spec)


@pytest.mark.parametrize(
    ("flags", "stage"), [((), 0), (("--per_device_train_batch_size", "2"), 2)], ids=["DeepSpeed", "Trainer"]
)
def test_a_stage_that_is_auto_is_what_fills_it_in(tmp_path: Path, flags: tuple[str, ...], stage: int) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": "auto"}}))
    command = ("x", "--deepspeed", "ds.json", *flags)
    job = task(engine="deepspeed", command=command, directory=str(tmp_path))
    assert DEEPSPEED.usual_space(job)[ZERO] == (stage,)


@pytest.mark.parametrize(
    ("zero", "offload", "step"),
    [({}, "none", 6.0), ({"sub_group_size": 1e6}, "none", None), ({}, "cpu", 0.0)],
    ids=["all", "a group", "on the host"],
)
def test_the_step_of_zero_3_copies_the_gradients_of_a_group(
    tmp_path: Path, zero: dict[str, float], offload: str, step: float | None
) -> None:
    """6.0 bytes per weight of a rank above its states: counted on two ranks with DeepSpeed 0.19.8 and torch 2.13."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, **zero}}))
    command = ("x", "--deepspeed", "ds.json")
    model = replace(DENSE, num_layers=40, hidden_size=1024, ffn_hidden_size=4096)
    job = task(model, devices=4, engine="deepspeed", command=command, directory=str(tmp_path), seq_length=64)
    columns = {knob.name: np.array([knob.axis(()).encode(knob.neutral)]) for knob in DEEPSPEED.knobs}
    columns |= {ZERO: np.array([3]), OFFLOAD: np.array([1 + (offload == "cpu")]), BUCKET: np.array([1])}
    numbers = DEEPSPEED.numbers(job, columns)
    found = DEEPSPEED.buffers(job, columns, numbers)
    train = training(job, 3, 0, DEEPSPEED.described.state_bytes)
    own = weights_of_rank(train, layout_of(numbers))[0] / 4
    copied = (found["step"] - found["between"])[0]
    assert copied == pytest.approx(6e6 if step is None else step * own)
    assert found["end"][0] == pytest.approx(2.0 - 2.0 * own * (offload == "cpu"))


@pytest.mark.parametrize(("stage", "overlaps"), [(2, False), (3, True), (7, None)])
def test_the_stage_of_zero_decides_on_the_overlap(tmp_path: Path, stage: int, overlaps: bool | None) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    job = task(engine="deepspeed", command=("x", "--deepspeed", "ds.json"), directory=str(tmp_path))
    if overlaps is None:
        with pytest.raises(SpecError, match="stage"):
            DEEPSPEED.usual_space(job)
    else:
        assert DEEPSPEED.usual_space(job)[OVERLAP] == (overlaps,)


@pytest.mark.parametrize("command", [("deepspeed", "train.py"), ("deepspeed", "train.py", "--deepspeed")])
def test_a_command_without_a_configuration_is_reported(command: tuple[str, ...]) -> None:
    with refuses("train.command"):
        DEEPSPEED.ready(task(engine="deepspeed", command=command).spec)


def test_settings_without_effect_are_one_candidate_and_offload_needs_zero() -> None:
    job = task(engine="deepspeed", command=("x",))
    columns = {ZERO: np.array([0, 1]), OVERLAP: np.array([1, 1]), BUCKET: np.array([5, 5]), OFFLOAD: np.array([2, 2])}
    columns |= {HPZ: np.array([1, 2]), **{name: np.array([0, 1]) for name in QUANTIZED}}
    (merge,) = DEEPSPEED.merges(job)
    assert {name: values.tolist() for name, values in merge.canonical(columns).items()} == {
        OVERLAP: [0, 1],
        BUCKET: [500_000_000, 5],
        HPZ: [1, 1],
        **{name: [0, 0] for name in QUANTIZED},
    }
    broken = {rule.name: rule.broken for rule in DEEPSPEED.rules(job)}
    assert broken["offload_needs_zero"](columns).tolist() == [True, False]
    other_order = {OFFLOAD: {"key": "zero_optimization.offload_optimizer.device", "values": {"cpu": 1, "none": 0}}}
    rules = DEEPSPEED.with_program({"knobs": other_order}).rules(job)
    (offload,) = (rule.broken for rule in rules if rule.name == "offload_needs_zero")
    assert offload({ZERO: np.array([0, 0]), OFFLOAD: np.array([1, 2])}).tolist() == [True, False]


@pytest.mark.parametrize(("given", "refused"), [({}, [False, True]), ({"reduce_scatter": False}, [False, False])])
def test_zero_3_with_muon_scatters_no_gradients(tmp_path: Path, given: dict[str, bool], refused: list[bool]) -> None:
    """DeepSpeed 0.19.8 raises ValueError when it starts, for the default of `reduce_scatter`."""
    config = {"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 2, **given}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    job = task(engine="deepspeed", command=("deepspeed", "x.py", "--deepspeed", "ds.json"), directory=str(tmp_path))
    (found,) = (rule.broken for rule in DEEPSPEED.rules(job) if rule.name == "muon_scatters")
    assert found({ZERO: np.array([2, 3])}).tolist() == refused


@pytest.mark.parametrize(
    ("optimizer", "stage", "moments"),
    [("Muon", 2, (4, 4, "others")), ("Muon", 3, (2, 6, "others")), ("AdamW", 2, (4, 4, "all"))],
)
def test_muon_has_no_second_moments_of_matrices(
    tmp_path: Path, optimizer: str, stage: int, moments: tuple[int, int, str]
) -> None:
    """ZeRO 1 and 2 keep two copies of the momentum in 16 bits, ZeRO 3 one. Other weights have Adam's 8 bytes."""
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": optimizer}}))
    job = task(engine="deepspeed", command=("deepspeed", "x.py", "--deepspeed", "ds.json"), directory=str(tmp_path))
    options = training(job, stage, 0, DEEPSPEED.states(job)).options
    assert (options.exp_avg_bytes, options.exp_avg_sq_bytes, options.second_moments) == moments


@pytest.mark.parametrize(("hpz", "is_legal"), [(2, True), (8, False)])
def test_ranks_with_a_second_copy_divide_the_devices(hpz: int, is_legal: bool) -> None:
    rules = {rule.name: rule.broken for rule in DEEPSPEED.rules(task(engine="deepspeed", command=("x",)))}
    assert rules["hpz_groups"]({HPZ: np.array([hpz])}).tolist() == [not is_legal]


@pytest.mark.parametrize(
    ("values", "rule"), [({AUTOTP: 2, ULYSSES: 2}, "autotp_or_ulysses"), ({ULYSSES: 8}, "ulysses")]
)
def test_rules_of_parallel_groups(values: dict[str, int], rule: str) -> None:
    job = task(engine="deepspeed", command=("x",))
    columns = {knob.name: np.array([knob.axis(()).encode(knob.neutral)]) for knob in DEEPSPEED.knobs}
    columns |= {name: np.array([size]) for name, size in values.items()}
    assert rule in [each.name for each in DEEPSPEED.rules(job) if each.broken(columns)[0]]


@pytest.mark.parametrize("is_untied", [True, False])
def test_autotp_leaves_an_embedding_whole_that_is_not_the_head(is_untied: bool) -> None:
    job = task(engine="deepspeed", command=("x",))
    model = replace(job.spec.model, untie_embeddings_and_output_weights=is_untied, vocab_size=32768)
    job = replace(job, spec=replace(job.spec, model=model))
    codes = {ZERO: 0, MICRO: 1, OFFLOAD: 0, OVERLAP: 0, BUCKET: 1000}
    columns = {**{name: np.full(2, code) for name, code in codes.items()}, AUTOTP: np.array([1, 2])}
    one, two = DEEPSPEED.predict(job, columns, costs(job)).static_bytes
    embedding = is_untied * model.vocab_size * model.hidden_size / parameters(model)
    assert embedding - 0.01 < 2.0 * two / one - 1.0 < 1.2 * embedding + 0.01  # with its gradients


def test_autotp_of_a_mixture_of_experts_needs_a_plan() -> None:
    for experts in (None, 8):
        job = task(engine="deepspeed", command=("x",))
        model = replace(job.spec.model, num_moe_experts=experts, moe_router_topk=2, moe_ffn_hidden_size=64)
        rules = {each.name: each.broken for each in DEEPSPEED.rules(replace(job, spec=replace(job.spec, model=model)))}
        assert rules["autotp_experts"]({AUTOTP: np.array([1, 2])}).tolist() == [False, experts is not None]


@pytest.mark.parametrize("is_framework", [True, False])
def test_ulysses_of_frameworks_divides_kv_heads_or_copies_them(
    monkeypatch: pytest.MonkeyPatch, is_framework: bool
) -> None:
    monkeypatch.setattr(deepspeed, "kept_framework", lambda _: "trl" if is_framework else None)
    monkeypatch.setattr(type(DEEPSPEED), "content", lambda *_: {})
    job = task(engine="deepspeed", command=("x",))
    job = replace(job, spec=replace(job.spec, model=replace(job.spec.model, num_query_groups=10)))
    rules = {rule.name: rule.broken for rule in DEEPSPEED.rules(job)}
    broken = rules["ulysses_groups"]({ULYSSES: np.array([2, 4, 10, 20])})
    assert broken.tolist() == [False, is_framework, False, False]


def test_groups_of_a_layer_are_written_and_need_less_memory(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(CONFIG)
    job = task(engine="deepspeed", command=("x", "--deepspeed=ds.json"), directory=str(tmp_path))
    platform, found = Platform(task=job, engine=DEEPSPEED, costs=costs(job)), {}
    for name in (ZERO, AUTOTP, ULYSSES):
        values = {**{knob.name: knob.neutral for knob in DEEPSPEED.knobs}, name: 2}
        launch = DEEPSPEED.launch(platform, Candidate.of(values), str(tmp_path))
        (path,) = (word.rpartition("=")[2] for word in launch.argv if word.endswith("candidate.json"))
        found[name] = json.loads(Path(path).read_text())
        columns = {knob.name: np.array([knob.axis(()).encode(values[knob.name])]) for knob in DEEPSPEED.knobs}
        found[name]["activation"] = DEEPSPEED.predict(job, columns, costs(job)).activation_bytes[0]
    assert (found[AUTOTP]["tensor_parallel"], found[AUTOTP]["train_batch_size"]) == ({"autotp_size": 2}, 16)
    assert (found[ULYSSES]["sequence_parallel_size"], "data_parallel_size" in found[ULYSSES]) == (2, False)
    assert not {"sequence_parallel_size", "data_parallel_size", "autotp_size"} & {*found[ZERO]}
    assert found[ULYSSES]["activation"] < found[ZERO]["activation"]


@pytest.mark.parametrize(
    ("zero", "precision", "shape", "batch", "held", "peak"),
    [
        ((1, 2, 1, 0, 700000), "bf16", (3, 256, 4, 4, 1280, 4096), (3, 3, 320), 46765576, 156245464),
        ((2, 4, 1, 1, 150000), "bf16", (5, 288, 6, 6, 512, 1536), (2, 1, 192), 23831528, 40846200),
        ((3, 4, 2, 0, 150000), "bf16", (3, 256, 4, 2, 896, 1536), (2, 3, 320), 15342573, 80492797),
        ((3, 2, 1, 0, 700000), "bf16", (4, 320, 4, 2, 1280, 1536), (2, 1, 192), 59327309, 100224589),
        ((0, 3, 1, 1, 700000), "bf16", (5, 288, 6, 2, 512, 1536), (2, 1, 320), 58943488, 90426828),
        ((0, 2, 1, 0, 100000), "bf16", (4, 168, 3, 1, 1088, 2560), (1, 4, 416), 47092556, 182375768),
        ((2, 3, 1, 1, 400000), "fp32", (6, 288, 4, 1, 384, 1024), (2, 4, 224), 30763272, 136171800),
    ],
)
def test_memory_is_that_of_counted_ranks(
    zero: tuple[int, ...], precision: str, shape: tuple[int, ...], batch: tuple[int, ...], held: int, peak: int
) -> None:
    """Bytes between steps and at the peak of forward and backward: DeepSpeed 0.19, torch 2.13, ranks on a CPU."""
    (stage, ranks, hpz, overlap, bucket), (accumulation, micro, length) = zero, batch
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size")
    sizes: dict[str, Any] = {**dict(zip(names, shape, strict=True)), "kv_channels": shape[1] // shape[2]}
    model = replace(DENSE, **sizes, gated_linear_unit=True, untie_embeddings_and_output_weights=True)
    load: dict[str, Any] = {
        "seq_length": length,
        "global_batch_size": ranks * accumulation * micro,
        "precision": precision,
    }
    job = task(model, devices=ranks, engine="deepspeed", command=("x",), **load)
    columns = {knob.name: np.array([knob.axis(()).encode(knob.neutral)]) for knob in DEEPSPEED.knobs}
    given = {ZERO: stage, MICRO: micro, HPZ: hpz, OVERLAP: overlap, BUCKET: bucket}
    found = DEEPSPEED.predict(job, columns | {name: np.array([value]) for name, value in given.items()}, costs(job))
    assert found.static_bytes[0] == pytest.approx(held, rel=0.01)
    assert found.static_bytes[0] + found.activation_bytes[0] == pytest.approx(peak, rel=0.015)


@pytest.mark.parametrize(("cap", "kept"), [(2, 2), (4, 4), (0, 0)])
def test_a_soft_cap_keeps_its_result_of_each_logit(cap: int, kept: int) -> None:
    """With transformers 5.24 and torch 2.13, 16.3 bytes for each logit of Gemma 2 at the peak, and 14.3 without."""
    columns, found = {knob.name: np.array([knob.axis(()).encode(knob.neutral)]) for knob in DEEPSPEED.knobs}, []
    for size in (cap, 0):
        model = replace(DENSE, vocab_size=262144, logit_cap_bytes=size)
        job = task(model, engine="deepspeed", command=("x",))
        found.append(DEEPSPEED.predict(job, columns, costs(job)).activation_bytes[0])
    assert found[0] - found[1] == kept * 262144 * job.spec.train.seq_length


def test_zero_3_keeps_as_many_weights_gathered_as_its_limit(tmp_path: Path) -> None:
    columns = {knob.name: np.array([knob.axis(()).encode(knob.neutral)]) for knob in DEEPSPEED.knobs}
    model, command = replace(DENSE, hidden_size=4096, ffn_hidden_size=16384), ("x", "--deepspeed=ds.json")
    job, found = task(model, devices=8, engine="deepspeed", command=command, directory=str(tmp_path)), []
    for limit in (3e8, 4e8):
        zero = {"stage3_max_live_parameters": limit, "stage3_prefetch_bucket_size": 1e6}
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
        found.append(DEEPSPEED.predict(job, columns | {ZERO: np.array([3])}, costs(job)).activation_bytes[0])
    assert found[1] - found[0] == pytest.approx(2 * 1e8)


def test_hooks_are_those_of_the_modules_of_transformers() -> None:
    """A layer of 5.24 has 13 in Llama, 15 in Qwen3, 14 in Qwen3-MoE; before 4.48 also a rotary embedding."""
    models = DENSE, replace(DENSE, qk_layernorm=True), replace(EXPERTS, qk_layernorm=True)
    assert [modules_of_layers(each) / each.num_layers for each in models] == [14, 16, 15]


def test_gradients_are_hidden_only_if_asked() -> None:
    job = task(engine="deepspeed", command=("x",), global_batch_size=32)
    plain = {knob.name: np.array([knob.axis(()).encode(knob.neutral)]) for knob in DEEPSPEED.knobs}
    found = {
        (stage, overlap): DEEPSPEED.predict(
            job, {**plain, ZERO: np.array([stage]), OVERLAP: np.array([overlap])}, costs(job)
        ).time_s["dp_comm_exposed_s"][0]
        for stage in (1, 2, 3)
        for overlap in (0, 1)
    }
    assert found[1, 1] < found[1, 0] < found[2, 0]  # stage 2 reduces each micro-batch
    assert found[2, 1] < found[2, 0]
    assert found[3, 1] < found[3, 0]


@pytest.mark.parametrize(("release", "warnings"), [("banana", 1), ("9.9", 1), ("0.19.8", 0), (None, 0)])
def test_an_unknown_release_is_named(release: str | None, warnings: int) -> None:
    job = task(engine="deepspeed", command=("x",), engine_version=release)
    assert len(DEEPSPEED.spec_warnings(job.spec)) == warnings


def test_values_in_use_are_read_from_the_log(tmp_path: Path) -> None:
    line = "[2026-11-26 09:08:37,{}] [INFO] [config.py:678:print]   {}\n"
    step = "[2026-11-26 09:08:3{},433] [INFO] [logging.py:107:log_dist] [Rank 0] step={}, skipped=0\n"
    text = line.format(433, "train_micro_batch_size_per_gpu  8") + line.format(434, "zero_optimization_stage ...... 1")
    (tmp_path / "stdout.log").write_text(text + "".join(step.format(number, number) for number in range(1, 6)))
    measured = DEEPSPEED.read(task(engine="deepspeed", command=("x",)), Candidate.of({}), str(tmp_path))
    assert measured.effective == {MICRO: 8, ZERO: 1}


def test_a_spec_adds_knobs_of_the_script() -> None:
    own: dict[str, Any] = {"knobs": {"ac": {"flag": "--ac", "values": {"none": 0, "full": 2}, "meaning": "recompute"}}}
    engine = DEEPSPEED.with_program(own)
    assert [knob.name for knob in engine.knobs] == [
        ZERO,
        MICRO,
        OFFLOAD,
        *(OVERLAP, BUCKET, HPZ, *QUANTIZED, AUTOTP, ULYSSES, "ac"),
    ]
    train = {"engine": "deepspeed", "seq_length": 64, "global_batch_size": 8, "precision": "bf16", "command": ["x"]}
    spec = {"model": SHAPE, "cluster": {"chip": "H100-SXM", "devices_per_node": 4}, "train": {**train, "program": own}}
    space = {ZERO: [1, 3], MICRO: [1, 2], OFFLOAD: "none", OVERLAP: False, BUCKET: 500_000_000, HPZ: 1}
    space |= dict.fromkeys(QUANTIZED, False)
    with refuses("auto_tuner.space.ac"):
        api.estimate({**spec, "auto_tuner": {"space": {**space, "ac": "half"}}})
    with refuses("train.program.knobs"):
        DEEPSPEED.with_program({"knobs": 3})


def test_frozen_weights_have_no_gradients_to_hold_or_exchange() -> None:
    columns = {name: np.full(4, code) for name, code in ((MICRO, 1), (OFFLOAD, 1), (OVERLAP, 0), (BUCKET, 1000))}
    columns |= {ZERO: np.arange(4)}
    jobs = [task(engine="deepspeed", command=("x",), adapter=each) for each in (None, Adapter(rank=8))]
    full, lora = (DEEPSPEED.predict(job, columns, costs(job)) for job in jobs)
    training_job = training(jobs[1], 0, 0, DEEPSPEED.described.state_bytes)
    layout = layout_of(DEEPSPEED.numbers(jobs[1], columns))
    whole, own = (weights_of_rank(training_job, layout, only_trained=each)[0] for each in (False, True))
    assert own < 0.2 * whole
    assert (lora.static_bytes[:3] - 2.0 * whole > 0.0).all()
    assert (lora.static_bytes < 0.8 * full.static_bytes).all()
    shares = lora.time_s["dp_comm_exposed_s"] / full.time_s["dp_comm_exposed_s"]
    assert (shares[:3] < 0.8).all()
    assert 0.3 < shares[3] <= 1.0  # weights are gathered


def test_dora_stores_two_outputs_of_each_layer_and_dropout_inputs_with_masks_as_peft_does() -> None:
    columns = {name: np.full(1, code) for name, code in ((MICRO, 1), (OFFLOAD, 1), (OVERLAP, 0), (BUCKET, 1000))}
    columns |= {ZERO: np.full(1, 3)}
    own = {"engine": "deepspeed", "command": ("x",), "seq_length": 4096}
    jobs = [task(adapter=each, **own) for each in (Adapter(), Adapter(kind="dora"), Adapter(dropout=True))]
    lora, dora, dropout = (DEEPSPEED.predict(job, columns, costs(job)).activation_bytes for job in jobs)
    model, tokens = jobs[0].spec.model, jobs[0].spec.train.seq_length
    parts = [part for layer in layers_of(model) for part in layer.parts]
    products = [each for part in parts for each in part.products(model.hidden_size)]
    assert dora - lora == pytest.approx(2.0 * 2.0 * tokens * sum(each.outputs for each in products), rel=0.01)
    inputs = sum(each.inputs * len(each.layers) for each in products)  # those of norms and down_proj are not stored
    frozen = (2 * model.hidden_size + model.ffn_hidden_size) * model.num_layers
    assert dropout - lora == pytest.approx(tokens * (3.0 * inputs - 2.0 * frozen))


def test_layers_are_recomputed_where_the_space_says_so() -> None:
    job = task(engine="deepspeed")
    assert DEEPSPEED.usual_space(job)[AC] == ("none",)
    columns = {name: np.array([1, 1]) for name in (ZERO, MICRO)} | {AC: np.array([1, 2])}
    found = DEEPSPEED.predict(job, columns, costs(job))
    assert found.activation_bytes[1] < found.activation_bytes[0]
    assert found.step_time_s[1] > found.step_time_s[0]
    own = DEEPSPEED.with_program({"fixed": {"recompute": 2}})
    assert AC not in {knob.name for knob in own.knobs}
    published, values, *_ = DEEPSPEED.published(job, {ZERO: 3, AC: "full"}, "LoRA r 8")
    assert published.spec.train.adapter == Adapter(rank=8)
    assert values == {ZERO: 3, AC: "full"}
