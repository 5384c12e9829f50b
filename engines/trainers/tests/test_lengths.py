"""Samples of several lengths in jobs of trainers that flagcore does not contain, and of FSDP2."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE as MEGATRON
from flagcore_trainers.deepspeed import DEEPSPEED
from flagcore_trainers.fsdp2.engine import FSDP2
from flagcore_trainers.torchtitan import TORCHTITAN
from flagcore_trainers.trainer import COMMAND

from flagcore.domain.lengths import Lengths
from tests.product.tasks import DENSE, costs, task

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
