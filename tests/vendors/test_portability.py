"""One spec on several chips: a C500's islands cost what they must, and unknown rates are named."""

from pathlib import Path

import pytest

from flagcore import api

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "examples" / "portability.yaml"
UNKNOWN = (
    *("C500X", "C588", "C600-A", "N260", "BI-V150S", "MR-V100-DUO"),
    *("MLU580", "MLU585", "MLU590-E", "MLU590-H8", "MLU590-M9", "MLU590-M9D"),
)


def exchange(chip: str, tensor: int) -> float:
    account = api.explain_candidate(SPEC, f"tp={tensor}, mbs=1, sp", chip=chip)
    assert account.predicted is not None
    return float(account.predicted["time"]["tp_comm_s"])


def test_tensor_parallelism_over_both_islands_of_a_c500_costs_more_than_on_a_full_mesh() -> None:
    assert exchange("C500", 8) > 2.5 * exchange("C500", 4)
    assert exchange("C550", 8) < 2.5 * exchange("C550", 4)


def test_a_c500_may_run_tensor_parallelism_over_both_islands() -> None:
    assert api.explain_candidate(SPEC, "tp=8, mbs=1, sp", chip="C500").state != "removed"


@pytest.mark.parametrize("chip", UNKNOWN)
def test_with_an_unpublished_rate_the_estimate_suggests_calibration(chip: str) -> None:
    found = api.estimate(SPEC, chip=chip, top=1)
    assert found.candidates[0].get("step_time_s", {}).get("value") is None
    assert found.untimed == found.counts.untried
    missing = "link between the 8 devices" if chip == "MLU590-M9" else f"peak rate of {chip} in bf16"
    assert missing in found.no_time
    assert "`flag calibrate`" in found.no_time
    assert ("give cluster.memory_per_device" in found.no_time) == (chip in ("MLU580", "MLU585", "MLU590-E"))
