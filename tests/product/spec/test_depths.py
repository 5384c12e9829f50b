"""Depths of multi-token prediction that a job trains."""

from typing import Any

import pytest

from flagcore import api
from flagcore.api.inputs import read_spec
from flagcore.domain.spec import TrainSpec
from flagcore.errors import SpecError
from flagcore.report.text import assumed_text

LORA = {"adapter": {"kind": "lora"}}
SHAPE = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 4096, "vocab_size": 32000}
NAME = "Qwen/Qwen3.6-27B"


def spec(model: Any = NAME, engine: str = "megatron", **train: Any) -> dict[str, Any]:
    work = {"engine": engine, "seq_length": 4096, "global_batch_size": 64, "precision": "bf16", **train}
    return {"model": model, "cluster": {"chip": "H200", "devices_per_node": 8}, "train": work}


def record(**train: Any) -> dict[str, Any]:
    cluster = {"chip": "H200", "devices": 8, "devices_per_node": 8}
    return {**spec(**train), "id": "a", "kind": "train", "cluster": cluster, "candidate": {}}


@pytest.mark.parametrize(
    ("given", "depths", "untrained"),
    [
        (spec(), 1, 0),
        (spec(**LORA), 0, 1),
        (spec(**LORA, mtp_num_layers=1), 1, None),
        (spec(mtp_num_layers=0), 0, None),
        (spec("Qwen/Qwen3-8B", **LORA), 0, None),
        (spec("Qwen/Qwen3-8B", mtp_num_layers=2), 2, None),
        (spec(engine="deepspeed"), 0, 1),
        (spec(engine="fsdp2"), 0, 1),
        (spec(engine="torchtitan", command=["torchrun", "train.py"]), 0, 1),
        (spec({**SHAPE, "mtp_num_layers": 1}, **LORA), 1, None),
        (spec({**SHAPE, "mtp_num_layers": 1}, mtp_num_layers=1), 1, None),
    ],
)
def test_a_job_trains_the_depths_that_it_names_or_that_its_engine_trains(
    given: dict[str, Any], depths: int, untrained: int | None
) -> None:
    found = read_spec(given)
    assert isinstance(found.work, TrainSpec)
    assert (found.model.mtp_num_layers, found.work.untrained_depths) == (depths, untrained)


def test_adapters_need_no_memory_for_depths_that_are_not_trained() -> None:
    records = (record(**LORA), record(**LORA, mtp_num_layers=0), record(**LORA, mtp_num_layers=1))
    usual, without, trained = (answer["memory"]["peak_allocated_gib"] for answer in api.estimate_jobs(records))
    assert usual == without < trained - 1


def test_two_numbers_of_depths_are_refused() -> None:
    with pytest.raises(SpecError) as caught:
        read_spec(spec({**SHAPE, "mtp_num_layers": 1}, mtp_num_layers=2))
    assert (caught.value.key, caught.value.value) == ("train.mtp_num_layers", 2)
    assert "model.mtp_num_layers = 1" in caught.value.problem


def test_an_estimate_names_the_depths_that_it_assumes() -> None:
    values = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 1, "micro_batch_size": 1}
    space = {name: [value] for name, value in values.items()}
    found = api.estimate({**spec(**LORA), "auto_tuner": {"space": space, "baseline": values}})
    assert found.assumed["mtp_num_layers"] == 0
    assert "0 trained depths" in assumed_text(found.assumed)
