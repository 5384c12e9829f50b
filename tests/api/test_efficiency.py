"""The bottleneck of a plan, and the cheapest change if nothing fits."""

from typing import Any

import pytest

from flagcore import api
from flagcore.errors import NothingFits
from flagcore.report.explanation import bottleneck_text

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


def test_the_bottleneck_of_the_fastest_candidate_is_named() -> None:
    found = api.estimate(plan(2))
    assert str(found.candidates[0]["limit"]) in bottleneck_text(found.candidates[0])


def test_where_nothing_fits_more_devices_of_a_node_come_before_more_nodes() -> None:
    data = plan(8, cluster={"chip": "H100-SXM", "devices_per_node": 1}, auto_tuner={"space": {"micro_batch_size": [1]}})
    with pytest.raises(NothingFits) as error:
        api.estimate(data)
    assert "cluster.devices_per_node = " in str(error.value)
