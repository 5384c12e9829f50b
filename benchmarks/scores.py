"""Computes the errors of predictions, and the quality of their ranking."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import yaml

CORRECTIONS = Path(__file__).with_name("corrections.yaml")

Pair = tuple[float | None, float]
"""Predicted (None if unknown) and measured cost."""

FLASH = ("NVIDIA NeMo 24.07 perf summary", "NVIDIA NeMo 24.07 perf summary (earlier revisions)")
FLASH += ("NVIDIA NeMo long-sequence page",)
"""Sources whose attention was FlashAttention 2: NVIDIA/NeMo-Framework-Launcher launcher_scripts/conf/config.yaml set
NVTE_FUSED_ATTN to 0 until 2024-08-29 (@04b8d098). These pages are of NeMo 24.03.01 to 24.07 (NVIDIA/NeMo
docs/source/performance). Transformer Engine prefers cuDNN on Hopper (1.9 transformer_engine/pytorch/attention.py)."""


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the measured job records of a file, with the settings that are known of their sources."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [record for line in lines if line.strip() and (record := json.loads(line)).get("measured")]
    for train in (record["train"] for record in records if record["source"] in FLASH):
        train["notes"] = "; ".join(filter(None, (train.get("notes"), "attention_backend=flash")))
    corrections = yaml.safe_load(CORRECTIONS.read_text(encoding="utf-8"))
    for record, part in product(records, ("train", "candidate")):
        record[part] = {**record.get(part, {}), **corrections.get(record.get("id"), {}).get(part, {})}
    return records


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Mean, median, 90th percentile and maximum of |predicted / measured - 1|, and the bias, which is the geometric
    mean of predicted / measured minus 1."""

    answered: int
    mape: float
    median: float
    p90: float
    worst: float
    bias: float


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Mean of Kendall's tau-b, and mean and maximum regret, over groups of jobs that differ only in their candidate.

    Regret is the relative slowdown of the candidate with the best prediction against the best measured one.
    """

    groups: int
    tau: float
    regret: float
    worst_regret: float


def errors(pairs: Iterable[Pair]) -> Errors | None:
    """Return the errors of `pairs`, None without predictions."""
    ratios = [predicted / measured for predicted, measured in pairs if predicted]
    if not ratios:
        return None
    deviations = sorted(abs(ratio - 1.0) for ratio in ratios)
    return Errors(
        answered=len(deviations),
        mape=statistics.fmean(deviations),
        median=statistics.median(deviations),
        p90=deviations[min(len(deviations) - 1, int(0.9 * len(deviations)))],
        worst=deviations[-1],
        bias=math.exp(statistics.fmean(map(math.log, ratios))) - 1.0,
    )


def ranking(groups: Mapping[object, Sequence[Pair]]) -> Ranking | None:
    """Return the ranking quality of groups with at least three candidates and different measurements.

    Candidates without a prediction rank last. If several candidates have the best prediction, the mean regret is used.
    """
    taus, regrets = [], []
    for pairs in groups.values():
        if len(pairs) < 3 or len({measured for _, measured in pairs}) < 2:
            continue
        predicted = [math.inf if each is None else each for each, _ in pairs]
        measured = [each for _, each in pairs]
        least = min(predicted)
        picked = [time for guess, time in zip(predicted, measured, strict=True) if guess <= least * (1 + 1e-9)]
        taus.append(kendall(predicted, measured))
        regrets.append(statistics.fmean(picked) / min(measured) - 1.0)
    if not taus:
        return None
    mean = statistics.fmean
    return Ranking(groups=len(taus), tau=mean(taus), regret=mean(regrets), worst_regret=max(regrets))


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau-b: 1 for the same order, -1 for the reverse, 0 if all values of one side are tied."""
    agree, differing, ties = 0, 0, [0, 0]
    for (a, b), (c, d) in combinations(zip(first, second, strict=True), 2):
        sign, other_sign = (a > c) - (a < c), (b > d) - (b < d)
        agree += sign * other_sign > 0
        differing += sign * other_sign < 0
        ties[0] += sign == 0 != other_sign
        ties[1] += other_sign == 0 != sign
    both = math.sqrt((agree + differing + ties[0]) * (agree + differing + ties[1]))
    return (agree - differing) / both if both else 0.0
