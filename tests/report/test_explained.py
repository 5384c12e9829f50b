"""One prediction in full, as text."""

from typing import Any

from flagcore.domain.prediction import Labels
from flagcore.engines.megatron.predict import LABELS
from flagcore.report.explanation import prediction_text

RECORD: dict[str, Any] = {
    "step_time_s": {"value": 2.0, "low": 1.5, "high": 2.5},
    "tokens_per_second_per_device": {"value": 1234.5, "low": 1.0, "high": 2.0},
    "mfu": 0.5,
    "time": {"compute_s": 1.5, "pp_bubble_s": 0.5},
    "limit": "bubble",
    "memory": {
        "fits": False,
        "capacity_gib": 10.0,
        "static_gib": 8.0,
        "activation_gib": 4.0,
        "peak_allocated_gib": 12.0,
        "reserved_gib": 12.5,
        "device_used_gib": 13.0,
        "worst_stage": 1,
        "components": {
            "output_head": {"params": 1e6, "activation_gib": 1.0},
            "novelty": {"params": 2e6, "activation_gib": 0.5},
            "qkv_proj": {"params": 3e6, "activation_gib": 2.5},
        },
    },
    "model": [
        {"component": "Embedding", "params_per_layer": 1e8, "layers": 1, "params": 1e8},
        {"component": "MLP", "params_per_layer": 2e8, "layers": 3, "params": 6e8},
    ],
}


def test_model_memory_and_time_are_reported_in_full() -> None:
    text = prediction_text(RECORD, LABELS)
    lines = [line.split() for line in text.splitlines()]
    assert ["MLP", "0.2000", "3", "0.6000"] in lines
    assert ["Total", "0.7000"] in lines
    order = [name for name in ("QKV Proj", "Output", "novelty") if name in text]
    assert sorted(order, key=text.index) == order
    assert "weight and optimizer=8192.00 MB, activation=4096.00 MB, total=12288.00 MB" in text
    assert "13.00 / 10.00 GiB (does not fit)" in text
    assert ["bubble", "0.5", "25.0%"] in lines
    assert "MFU 50.0%" in text
    assert text.endswith("Bottleneck: bubble")


def test_the_memory_table_adds_up_to_the_peak() -> None:
    components = {"embedding": {"params": 1e6, "weights_gib": 3.0, "optimizer_gib": 5.0, "activation_gib": 4.0}}
    for peak, rest in ((12.0, "0.000"), (11.75, "-0.250"), (14.5, "2.500")):
        memory = RECORD["memory"] | {"components": components, "peak_allocated_gib": peak}
        rows = [line.split() for line in prediction_text(RECORD | {"memory": memory}, LABELS).splitlines()]
        assert ["other", "0", "0.000", "0.000", rest] in rows
        assert ["Total", "1,000,000", "3.000", "5.000", f"{peak - 8:.3f}"] in rows


SERVED: dict[str, Any] = {
    "output_tokens_per_s": 1500.0,
    "ttft_s": {"mean": 0.1, "p50": 0.09, "p90": 0.2, "p99": 0.3},
    "objective": {"value": 1500.0, "low": 1000.0, "high": 1800.0},
    "time": {"queue_s": 0.5, "prefill_s": 0.25, "decode_s": 0.25, "collectives_s": 0.0, "host_s": 0.0},
    "memory": {
        "fits": True,
        "capacity_gib": 80.0,
        "static_gib": 60.0,
        "activation_gib": 2.0,
        "device_used_gib": 70.0,
        "kv_cache_gib": 40.0,
        "kv_cache_tokens": 320000.0,
    },
}


def test_a_server_is_described_with_units() -> None:
    text = prediction_text(SERVED, Labels())
    assert "~1,500 output tokens/s" in text
    assert "Mean time of a request: ~1 s" in text
    assert ["queue", "0.5", "50.0%", "waiting"] in [line.split()[:4] for line in text.splitlines()]
    assert "weights ~20.00, activations and graphs ~2.00, KV cache (320,000 tokens" in text
    assert "~70.00 / 80.00 GiB (fits)" in text
    assert "{" not in text
    assert "_s" not in text
