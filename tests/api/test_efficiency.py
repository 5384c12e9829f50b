"""The bottleneck of a plan, and the warning about a low MFU with the cheapest change."""

import re
from typing import Any

import pytest

from flagcore import api
from flagcore.api.planning.estimate import FAR_BELOW, USUAL_MFU
from flagcore.errors import NothingFits

SHAPE = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
SHAPE["vocab_size"] = 32000
SPACE = {"context_parallel_size": 1, "use_recompute": False, "use_distributed_optimizer": True}


def plan(batch: int, **more: Any) -> dict[str, Any]:
    space = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8, "micro_batch_size": 1}
    data = {
        "model": SHAPE,
        "cluster": {"chip": "H100-SXM", "nodes": 4, "devices_per_node": 8},
        "train": {"engine": "megatron", "seq_length": 2048, "global_batch_size": batch, "precision": "bf16"},
        "auto_tuner": {"space": {**SPACE, **space}},
    }
    return {**data, **more}


def test_a_low_mfu_has_its_reason_and_the_cheapest_change() -> None:
    found = api.estimate(plan(2))
    assert found.candidates[0]["mfu"] < FAR_BELOW * USUAL_MFU[0]
    assert str(found.candidates[0]["limit"]) in found.warning
    better = float(re.findall(r"([\d.]+)%", found.warning)[-1]) / 100
    assert better > 1.05 * found.candidates[0]["mfu"]
    assert str(found.candidates[0]["limit"]) in found.bottleneck


def test_an_ordinary_mfu_has_no_warning() -> None:
    found = api.estimate(plan(1024))
    assert found.candidates[0]["mfu"] > FAR_BELOW * USUAL_MFU[0]
    assert found.warning == ""


def test_small_models_are_not_compared_with_large_jobs() -> None:
    small = {"num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 4, "vocab_size": 1000}
    assert api.estimate(plan(8, model=small)).warning == ""


def test_where_nothing_fits_more_devices_of_a_node_come_before_more_nodes() -> None:
    data = plan(8, cluster={"chip": "H100-SXM", "devices_per_node": 1}, auto_tuner={"space": {"micro_batch_size": [1]}})
    with pytest.raises(NothingFits) as error:
        api.estimate(data)
    assert "cluster.devices_per_node = " in str(error.value)
