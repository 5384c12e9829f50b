"""Models with several kinds of layers on the engines of trainers: all weights once, and an answer for each. Samples of
several lengths in jobs of trainers that flagcore does not contain, and of FSDP2."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE as MEGATRON
from flagcore_models.layers import parameters
from flagcore_trainers.deepspeed import DEEPSPEED
from flagcore_trainers.fsdp2.engine import FSDP2
from flagcore_trainers.fully_shard import EP, REPLICATE, SHARD
from flagcore_trainers.torchtitan import TORCHTITAN
from flagcore_trainers.trainer import COMMAND

from engines.models.tests.examples import layer_of
from flagcore.domain.model import Mixer, Model, Product
from flagcore.domain.prediction import Predictions
from flagcore.domain.spec import Adapter
from flagcore.domain.work import Lengths
from flagcore.spec.models import model_from
from tests.product.tasks import DENSE, EXPERTS, costs, task

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
