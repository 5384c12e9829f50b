"""Models with several kinds of layers on the engines of trainers: all weights once, and an answer for each. Samples of
several lengths in jobs of trainers that flagcore does not contain, and of FSDP2.
Adapters are those of PEFT, in programs that train models of transformers with it."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_importers.command import read_command
from flagcore_megatron.engine import ENGINE as MEGATRON
from flagcore_models.config import model_of_config
from flagcore_models.layers import layer_counts, parameters, weights_by_group
from flagcore_models.parts.tower import VisionTower
from flagcore_trainers.deepspeed import BUCKET, DEEPSPEED, MICRO, OFFLOAD, ZERO
from flagcore_trainers.fsdp2.engine import FSDP2
from flagcore_trainers.fully_shard import AC, COMPILE, EP, REPLICATE, SELECTIVE, SHARD, STATES
from flagcore_trainers.fully_shard.activations import activations
from flagcore_trainers.fully_shard.predict import full_share, memory_job, predict, selective_share
from flagcore_trainers.fully_shard.predict import training as fsdp2_training
from flagcore_trainers.fully_shard.traffic import TRIAL
from flagcore_trainers.fully_shard.weights import layers_of_rank
from flagcore_trainers.meaning import layout_of, training, weights_of_rank
from flagcore_trainers.torchtitan import TORCHTITAN
from flagcore_trainers.trainer import COMMAND
from flagcore_training.adapters import BASE_BYTES, adapter_section
from flagcore_training.peft import PARAMETERS

from engines.models.tests.examples import layer_of
from flagcore.domain.model import Mixer, Model, Product
from flagcore.domain.prediction import Predictions
from flagcore.domain.spec import Adapter
from flagcore.domain.work import Lengths
from flagcore.spec.models import model_from
from tests.product.tasks import DENSE, EXPERTS, costs, task
from tests.tasks import planned

ENGINES: dict[str, Any] = {"fsdp2": FSDP2, "deepspeed": DEEPSPEED, "torchtitan": TORCHTITAN}
BYTES = 16.0
"""Bytes of a weight, its gradient and both moments, all of which have 32 bits."""
NAMES = (
    "Qwen/Qwen3-8B",
    "deepseek-ai/DeepSeek-V2-Lite",
    "moonshotai/Kimi-K2-Instruct",
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "openai/gpt-oss-20b",
    "google/gemma-3-4b-it",
    "google/gemma-3n-E4B",
    "google/gemma-4-E2B",
    "google/gemma-4-31B",
    "poolside/Laguna-XS.2",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B",
    "deepseek-ai/DeepSeek-V4-Flash",
)
"""Names of families with other layers: latent attention, states, windows, own heads, own embeddings, latent experts."""


@cache
def model(name: str) -> Model:
    return model_from(name, base=Path())


def predicted(
    engine: str, model: Model, values: dict[str, Any] | None = None, devices: int = 64, **train: Any
) -> Predictions:
    """Return the predictions of one candidate, which is legal."""
    chosen, command = ENGINES[engine], None if engine == "fsdp2" else ("x", "--deepspeed", "ds.json")
    ranks = {SHARD: devices} if engine == "fsdp2" else {}
    job = task(model, engine=engine, devices=devices, global_batch_size=64, command=command, **train)
    given = {knob.name: knob.neutral for knob in chosen.knobs} | ranks | (values or {})
    row = {knob.name: np.array([knob.axis(()).encode(given[knob.name])]) for knob in chosen.knobs}
    rules = FSDP2.rules(job) if engine == "fsdp2" else ()
    assert not [each.name for each in rules if each.broken(row).any()]
    found: Predictions = chosen.predict(job, row, costs(job))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_weight_is_held_once(name: str) -> None:
    weights = float(predicted("fsdp2", model(name), devices=1).static_bytes[0]) / BYTES
    assert weights == pytest.approx(parameters(model(name)), rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_each_kind_of_layer_has_an_answer(name: str, engine: str) -> None:
    found = predicted(engine, model(name))
    assert found.step_time_s[0] > 0
    assert found.peak_allocated_bytes[0] > found.static_bytes[0] > 0


@dataclass(frozen=True, kw_only=True)
class Echo(Mixer):
    """A mixer of a package that these engines do not know."""

    label = "Echo"

    width: int

    @property
    def heads(self) -> int:
        return self.width

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        inputs = Product(inputs=hidden_size, outputs=2 * self.width)
        return inputs, Product(inputs=self.width, outputs=hidden_size, split="inputs")

    @property
    def other_weights(self) -> int:
        return 64 * self.width

    @property
    def saved(self) -> float:
        return 3.0 * self.width


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mixer_needs_no_more_than_its_numbers(engine: str) -> None:
    def of(width: int, **train: Any) -> Predictions:
        layers = (layer_of(DENSE, Echo(width=width)), layer_of(DENSE, network=""))
        return predicted(engine, replace(DENSE, num_layers=2, layers=layers), **train)

    narrow, wide = of(1024), of(2048)
    bytes_of_weight = BYTES / 64 if engine != "deepspeed" else 14.0  # all of it, without gradients between steps
    weights = 1024 * (3 * DENSE.hidden_size + 64)
    assert wide.static_bytes - narrow.static_bytes == pytest.approx(bytes_of_weight * weights)
    assert wide.activation_bytes > narrow.activation_bytes
    assert wide.step_time_s > narrow.step_time_s
    if engine != "torchtitan":
        tuned = of(2048, adapter=Adapter(targets=("in_proj",)))
        assert tuned.static_bytes < 0.7 * wide.static_bytes


def test_selective_checkpoints_keep_the_output_of_other_attention() -> None:
    class Attending(Echo):
        def token_bytes(self, element_bytes: float) -> float:
            return element_bytes

    columns, stored = {**fsdp2_columns(), AC: np.array([SELECTIVE])}, list[float]()
    for mixer in (Echo(width=64), Attending(width=64)):
        job = task(replace(DENSE, num_layers=1, layers=(layer_of(DENSE, mixer),)), engine="fsdp2")
        stored.append(activations(memory_job(job, columns, fused_norm=False)).stored[0])
    assert stored[1] - stored[0] == 2.0 * 64 * job.spec.train.seq_length


def test_selective_checkpoints_compute_latent_experts_again_in_their_width() -> None:
    models = [replace(EXPERTS, moe_latent_size=each) for each in (None, EXPERTS.hidden_size, EXPERTS.hidden_size // 4)]
    shares = [selective_share(fsdp2_training(task(each, engine="fsdp2"), compiled=False)) for each in models]
    assert shares[0] > shares[1] > shares[2]


def test_checkpoints_that_stop_early_leave_out_the_last_product_of_dense_networks() -> None:
    shares = [full_share(fsdp2_training(task(each, engine="fsdp2"), compiled=False)) for each in (DENSE, EXPERTS)]
    assert 0.5 < shares[0] < shares[1] == 1.0
    job = task(DENSE, engine="fsdp2", devices=8, global_batch_size=16)
    columns = {**fsdp2_columns(), AC: np.array([SELECTIVE + 1])}
    seconds = [
        predict(job, columns, costs(job), replace(TRIAL, stops_early=each)).time_s["compute_s"]
        for each in (True, False)
    ]
    assert seconds[0] < seconds[1]


def test_compiled_layers_do_not_store_the_activation_of_a_gate() -> None:
    plain, compiled = (
        predicted("fsdp2", DENSE, {COMPILE: each}, seq_length=4096).activation_bytes for each in (False, True)
    )
    assert plain - compiled == 2.0 * 4096 * DENSE.ffn_hidden_size * DENSE.num_layers


def test_layers_that_repeat_others_have_activations_and_no_weights() -> None:
    layers = layer_of(DENSE), layer_of(DENSE, repeats=True)
    once, twice = (
        predicted("fsdp2", replace(DENSE, num_layers=len(each), layers=each), seq_length=4096)
        for each in (layers[:1], layers)
    )
    assert twice.static_bytes == once.static_bytes
    assert twice.activation_bytes > once.activation_bytes
    assert twice.step_time_s > once.step_time_s


def test_latent_experts_have_fewer_weights_and_two_products_more() -> None:
    plain, latent = (replace(EXPERTS, moe_latent_size=size) for size in (None, 16))
    static = [float(predicted("fsdp2", each, devices=1).static_bytes[0]) / BYTES for each in (plain, latent)]
    h, count = EXPERTS.hidden_size, EXPERTS.num_moe_experts or 0
    routed = 3 * count * 32 * (h - 16) - 2 * h * 16
    assert static[0] - static[1] == 4 * routed


def test_models_without_experts_wait_for_no_experts() -> None:
    ranks = {SHARD: 2, REPLICATE: 32}
    alone, split = (predicted("fsdp2", DENSE, {**ranks, EP: size}).step_time_s for size in (1, 4))
    assert np.isfinite(split).all()
    assert split == alone


PROGRAM = {"knobs": {"micro_batch_size": {"values": [1, 2]}, "zero_stage": {"values": [0, 3]}}}
LENGTH = 1024
SAMPLES = tuple(range(50, 1001, 50))
MODEL = replace(DENSE, hidden_size=2048, num_attention_heads=16, num_query_groups=16, kv_channels=128)


@pytest.mark.parametrize("engine", [DEEPSPEED, TORCHTITAN, FSDP2, COMMAND.with_program(PROGRAM)])
@pytest.mark.parametrize(("stage", "samples", "width"), [(0, 2, 2048), (3, 2, 2048), (3, 1, 4096)])
def test_packing_is_faster_per_token_than_padding(engine: Any, stage: int, samples: int, width: int) -> None:
    values = {"micro_batch_size": samples, "zero_stage": stage}
    columns = {
        each.name: np.array([each.axis(()).encode(values.get(each.name, each.neutral))]) for each in engine.knobs
    }

    def seconds_per_token(lengths: Lengths | None) -> float:
        given = {"seq_length": LENGTH, "global_batch_size": 16, "lengths": lengths}
        model = replace(MODEL, hidden_size=width, kv_channels=width // 16, ffn_hidden_size=4 * width)
        job = task(model, engine=engine.name, command=("x",), devices=4, **given)
        return float(engine.predict(job, columns, costs(job)).step_time_s[0] / job.spec.train.step_tokens)

    packed, longest, padded = (
        seconds_per_token(Lengths(values=SAMPLES, batching=each)) for each in ("packed", "longest", "seq_length")
    )
    assert packed < longest <= padded * (1.0 + 1e-9)
    assert packed <= seconds_per_token(None) * 1.001
    assert seconds_per_token(Lengths(values=(LENGTH,))) == pytest.approx(seconds_per_token(None), rel=1e-12)


NOTES = {
    "": None,
    "no sequence packing": None,
    "LoRA; packing: off": None,
    "unpacked samples": None,
    "padding-free packing": LENGTH // 2,
    "packed sequences (offline packing to 2048)": 400,
    "{'sequence_packing': 'offline'}": 400,
}


@pytest.mark.parametrize("engine", [DEEPSPEED, FSDP2, MEGATRON])
@pytest.mark.parametrize("notes", NOTES)
def test_published_runs_on_packed_samples_say_so_in_notes(engine: Any, notes: str) -> None:
    job = task(MODEL, engine=engine.name, seq_length=LENGTH, devices=4)
    published, _, _, warnings = engine.published(job, {}, notes)
    lengths, mean = published.spec.train.lengths, NOTES[notes]
    assert (None if lengths is None else round(float(np.mean(lengths.values)))) == mean
    assert bool(warnings) == bool(mean)
    given = replace(job, spec=replace(job.spec, work=replace(job.spec.train, lengths=Lengths(values=SAMPLES))))
    assert engine.published(given, {}, notes)[0].spec.train.lengths == Lengths(values=SAMPLES)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 256}
SIZES |= {"num_attention_heads": 4, "num_experts_per_tok": 2}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
ROUTED = {**GROUPED, "num_experts": 8, "moe_intermediate_size": 48}
SHARED = {**ROUTED, "shared_expert_intermediate_size": 80}
DELTA = {f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 4))}
DELTA |= {f"linear_{name}_head_dim": 16 for name in ("key", "value")} | {"linear_conv_kernel_dim": 4}
ONE_DENSE = {**ROUTED, "first_k_dense_replace": 1}
LATENT = {**ONE_DENSE, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "v_head_dim": 16, "n_shared_experts": 1}
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4}
CHANNELS = {**LINEAR, "linear_num_heads": 4, "linear_head_dim": 16}
REPEATED = {**LINEAR, **{f"linear_num_{name}_heads": 4 for name in ("key", "value")}}
REPEATED |= {"linear_key_head_dim": 12, "linear_value_head_dim": 24}
ATTENTION = {"layer_types": ["attention"] * 4, "shared_intermediate_size": 80}


def fsdp2_columns() -> dict[str, Any]:
    return {knob.name: np.array([knob.axis(()).encode(knob.neutral)]) for knob in FSDP2.knobs}


@pytest.mark.parametrize(
    ("family", "sizes", "weights"),
    [  # of `get_peft_model` with `LoraConfig(r=8, target_modules="all-linear")`, peft 0.21.2 and transformers 5.24.0
        ("llama", GROUPED, 29_696),
        ("gemma3_text", GROUPED, 29_696),
        ("phi3", GROUPED, 23_552),
        ("gpt_oss", {**GROUPED, "num_experts": 8}, 14_336),
        ("mixtral", {**GROUPED, "num_experts": 8}, 188_672),
        ("minimax_m2", {**GROUPED, "num_experts": 8}, 188_672),
        ("olmoe", {**GROUPED, "num_experts": 8}, 188_672),
        ("hunyuan_v1_moe", {**GROUPED, "num_experts": 8}, 188_672),
        ("qwen2_moe", SHARED, 30_240),
        ("qwen3_moe", ROUTED, 127_232),
        ("qwen3_next", {**SHARED, **DELTA}, 130_016),
        ("qwen3_5_text", {**GROUPED, **DELTA}, 33_472),
        ("qwen3_5_moe_text", {**SHARED, **DELTA}, 34_016),
        ("glm4_moe", ONE_DENSE, 99_008),
        ("dots1", {**ONE_DENSE, "n_shared_experts": 1}, 99_008),
        ("ernie4_5_moe", ONE_DENSE, 99_008),
        ("deepseek_v3", LATENT, 103_872),
        ("deepseek_v32", INDEXED, 110_592),
        ("llama4_text", {**GROUPED, "num_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}, 32_000),
        ("granitemoehybrid", {**GROUPED, **ATTENTION, "num_experts": 8}, 26_112),
        ("granitemoeshared", {**GROUPED, "num_experts": 8, "shared_intermediate_size": 48}, 23_040),
        ("afmoe", {**ROUTED, "num_dense_layers": 1, "num_shared_experts": 1}, 99_008),
        ("kimi_linear", {**LATENT, **CHANNELS, "q_lora_rank": None, "kv_lora_rank": 32}, 37_920),
        ("olmo_hybrid", {**GROUPED, **REPEATED}, 39_104),
    ],
)
def test_all_linear_layers_are_those_of_peft(family: str, sizes: dict[str, Any], weights: int) -> None:
    model = model_of_config({"model_type": family, **SIZES, **sizes}, name=family, file="config.json")
    job = task(model, engine="fsdp2", adapter=Adapter(rank=8))
    sharded = memory_job(job, fsdp2_columns(), fused_norm=False)
    assert layers_of_rank(sharded, layer_counts(model), only_trained=True)[0] == weights
    states, numbers = DEEPSPEED.described.state_bytes, DEEPSPEED.numbers(job, {ZERO: np.zeros(1, np.int64)})
    assert weights_of_rank(training(job, 0, 0, states), layout_of(numbers), only_trained=True) == weights


FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
OWN_INPUTS = ["q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "up_proj"]


@pytest.mark.parametrize(
    ("family", "sizes", "names", "weights"),
    [  # of `get_peft_model`, as above
        ("phi3", GROUPED, FUSED, 23_552),
        ("mixtral", {**GROUPED, "num_experts": 8}, ["q_proj", "w1", "w2", "w3"], 176_128),
        ("qwen3_5_text", {**GROUPED, **DELTA}, OWN_INPUTS, 21_696),
        ("phi", GROUPED, ["q_proj", "dense", "fc1", "fc2"], 18_432),
        ("starcoder2", GROUPED, ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"], 24_576),
    ],
)
def test_layers_have_the_names_of_a_family(family: str, sizes: dict[str, Any], names: list[str], weights: int) -> None:
    shape = model_of_config({"model_type": family, **SIZES, **sizes}, name=family, file="config.json")
    section: dict[str, Any] = adapter_section("lora", 8, names)
    job = task(shape, engine="fsdp2", adapter=Adapter(rank=8, targets=tuple(section["targets"])))
    sharded = memory_job(job, fsdp2_columns(), fused_norm=False)
    assert layers_of_rank(sharded, layer_counts(shape), only_trained=True)[0] == weights


@pytest.mark.parametrize(
    ("family", "sizes", "weights"),
    [  # of `get_peft_model` with `target_parameters` of both matrices beside q_proj, as above
        ("gpt_oss", {**GROUPED, "num_experts": 8}, 110_592),
        ("qwen3_moe", ROUTED, 73_728),
        ("qwen3_5_moe_text", {**SHARED, **DELTA}, 71_168),
        ("mixtral", {**GROUPED, "num_experts": 8}, 110_592),
    ],
)
def test_parameters_of_experts_have_the_rank_of_the_recipe(family: str, sizes: dict[str, Any], weights: int) -> None:
    shape = model_of_config({"model_type": family, **SIZES, **sizes}, name=family, file="config.json")
    job = task(shape, engine="fsdp2", adapter=Adapter(rank=8, targets=("q_proj", *PARAMETERS)))
    sharded = memory_job(job, fsdp2_columns(), fused_norm=False)
    assert layers_of_rank(sharded, layer_counts(shape), only_trained=True)[0] == weights


@pytest.mark.parametrize(
    ("optimizer", "moments", "of_embedding"),
    [
        ("adamw_8bit", 2.0 * (1.0 + 4.0 / 256.0), 8.0),
        ("paged_adamw_8bit", 2.0 * (1.0 + 4.0 / 256.0), 8.0),
        ("adamw_torch_4bit", 1.0 + 8.0 / 256.0, 1.0 + 8.0 / 256.0),  # torchao's, also of the embedding
        ("adamw_torch_8bit", 2.0 * (1.0 + 4.0 / 256.0), 2.0 * (1.0 + 4.0 / 256.0)),
        ("lion_8bit", 1.0 + 4.0 / 256.0, 4.0),
        ("ademamix", 12.0, 12.0),
        ("prodigy", 16.0, 16.0),
        ("came_pytorch", 4.0, 4.0),
        ("schedule_free_adamw", 8.0, 8.0),
        ("schedule_free_sgd", 4.0, 4.0),
        ("stable_adamw", 8.0, 8.0),
        ("muon", 4.0, 8.0),
        ("lion_32bit", 4.0, 4.0),
        ("adafactor", 0.0, 0.0),
        ("adamw_torch", 8.0, 8.0),
        ("galore_adamw", 0.347, 8.0),  # of rank 128
        ("sophia", 8.0, 8.0),
    ],
)
def test_moments_have_the_bytes_of_the_optimizer(
    optimizer: str, moments: float, of_embedding: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But those of the embedding in bitsandbytes' 8 bits, which transformers leaves in fp32. Others are named."""
    monkeypatch.chdir(tmp_path)
    text = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
    static = []
    for each in (optimizer, "adamw_torch"):
        Path("own.yaml").write_text(f"{text}dp_shard_size: 8\noptimizer: {each}\n")
        imported = read_command(None, ["axolotl train own.yaml"], chip="H100-SXM")
        platform = planned(dict(imported.data))
        values = (
            {knob.name: knob.neutral for knob in FSDP2.knobs}
            | imported.data["auto_tuner"]["baseline"]
            | {STATES: "fp32"}
        )
        row = {knob.name: np.array([knob.axis(()).encode(values[knob.name])]) for knob in FSDP2.knobs}
        static.append(FSDP2.predict(platform.task, row, platform.costs).static_bytes[0])
        assert any("optimizer" in note.key for note in imported.notes) == (each == "sophia")
    table = 151936 * 4096
    saved = (8.19e9 - table) * (8.0 - moments) / 8 + table * (8.0 - of_embedding) / 8
    assert static[1] - static[0] == pytest.approx(saved, rel=0.001)


@pytest.mark.parametrize(("options", "element"), [("", 4.0), ("--use_peft", 2.0)])
def test_the_weights_of_a_vision_tower_are_loaded_for_text_too(options: str, element: float) -> None:
    words = f"trl sft --model_name_or_path google/gemma-3-27b-it --accelerate_config fsdp2 --num_processes 8 {options}"
    platform = planned(dict(read_command(None, [words], chip="H200").data))
    job, row = platform.task, fsdp2_columns()
    assert job.spec.model.vision is not None
    text = replace(job, spec=replace(job.spec, model=replace(job.spec.model, vision=None)))
    whole, others = (FSDP2.predict(each, row, platform.costs).static_bytes[0] for each in (job, text))
    assert whole - others == pytest.approx(VisionTower(vision=job.spec.model.vision).weights * element)


@pytest.mark.parametrize(
    ("options", "share"),
    [("--load_in_4bit", 1.0), ("--load_in_4bit --bnb_4bit_quant_storage bfloat16", 0.25), ("--load_in_8bit", 1.0)],
)
def test_fsdp2_divides_no_weights_that_are_stored_as_integers(options: str, share: float) -> None:
    """accelerate 1.15 leaves them out of `fully_shard`; embedding and head, in 16 bits, are divided."""
    words = (
        f"trl sft --model_name_or_path Qwen/Qwen3-8B --use_peft --accelerate_config fsdp2 --num_processes 4 {options}"
    )
    data = read_command(None, [words], chip="H100-SXM").data
    data["cluster"]["devices_per_node"] = 4
    data["auto_tuner"]["baseline"][SHARD] = 4
    platform = planned(dict(data))
    values = {knob.name: knob.neutral for knob in FSDP2.knobs} | data["auto_tuner"]["baseline"]
    row = {knob.name: np.array([knob.axis(()).encode(values[knob.name])]) for knob in FSDP2.knobs}
    table, base = 151936 * 4096, BASE_BYTES["int8" if "8bit" in options else "nf4"]
    trained = 16.0 * 36 * 16 * (4 * 4096 - 3072) / 4  # adapters of rank 16 beside queries and values
    frozen = share * base * (8.19e9 - 2 * table) + 2.0 * 2 * table / 4 + trained
    assert FSDP2.predict(platform.task, row, platform.costs).static_bytes[0] == pytest.approx(frozen, rel=0.02)


def test_experts_stay_in_16_bits_unless_the_adapter_says_that_they_are_quantized() -> None:
    plain = Adapter(kind="qlora", base="nf4", targets=("q_proj",))
    adapters = [replace(plain, quantized_experts=each) for each in (True, False)]
    jobs = [task(EXPERTS, engine="deepspeed", command=("x",), adapter=each) for each in adapters]
    columns = {name: np.full(1, code) for name, code in ((MICRO, 1), (OFFLOAD, 1), (ZERO, 0), (BUCKET, 0))}
    quantized, others = (DEEPSPEED.predict(job, columns, costs(job)).static_bytes[0] for job in jobs)
    experts = weights_by_group(EXPERTS)["experts"]
    assert others - quantized == pytest.approx(experts * (2.0 - BASE_BYTES["nf4"]))
    memory = [memory_job(each, fsdp2_columns(), fused_norm=False).stored_bytes for each in jobs]
    assert memory == [(BASE_BYTES["nf4"], BASE_BYTES["nf4"]), (BASE_BYTES["nf4"], 2.0)]


@pytest.mark.parametrize(("engine", "values"), [("fsdp2", {}), ("deepspeed", {ZERO: 0})])
def test_all_frozen_weights_in_fp32_need_twice_their_memory(engine: str, values: dict[str, Any]) -> None:
    adapters = (Adapter(targets=("q_proj",), base=each) for each in ("fp32", None))
    wide, narrow = (predicted(engine, DENSE, values, devices=1, adapter=each) for each in adapters)
    assert wide.static_bytes[0] - narrow.static_bytes[0] == pytest.approx(2.0 * parameters(DENSE), rel=0.08)
    assert wide.step_time_s[0] < 1.1 * narrow.step_time_s[0]


def test_experts_in_fp32_need_twice_their_memory_and_perhaps_more_time() -> None:
    plain = Adapter(kind="qlora", base="nf4", targets=("q_proj",))
    jobs = [task(EXPERTS, engine="fsdp2", adapter=replace(plain, fp32_experts=each)) for each in (True, False)]
    memory = [memory_job(each, fsdp2_columns(), fused_norm=False).stored_bytes for each in jobs]
    assert memory == [(BASE_BYTES["nf4"], 4.0), (BASE_BYTES["nf4"], 2.0)]
    assert [[each.time for each in FSDP2.unmodelled(job)] for job in jobs] == [[(1.0, 15.0)], []]


def test_adapters_beside_experts_store_a_second_copy_of_them() -> None:
    adapters = [Adapter(targets=("q_proj", *each)) for each in ((), ("gate_proj", "up_proj", "down_proj"))]
    jobs = [task(EXPERTS, engine="fsdp2", adapter=each) for each in adapters]
    few, many = (activations(memory_job(job, fsdp2_columns(), fused_norm=False)).stored[0] for job in jobs)
    assert many - few > 2.0 * weights_by_group(EXPERTS)["experts"]
