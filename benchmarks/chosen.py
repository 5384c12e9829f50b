"""Plans published training jobs anew, and compares the chosen plan and the published layout with the measured step.

    python benchmarks/chosen.py [unseen] [ID-WORD ...]

One job per model, cluster and lengths: the fastest published run. Prints, for each job, measured / planned seconds (the
gain that the plan promises), the published layout's place among all legal candidates, and its predicted time relative
to the plan; then the geometric means by kind of model and the jobs inside the interval that a plan shows, over all
sources and without each.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from flagcore import api
from flagcore.api.inputs import loaded_plugins, open_spec
from flagcore.api.jobs import CHOSEN
from flagcore.tuner.problem import recommended_row

BOUNDS = ("not_likely", "far_too_slow", "far_too_large")
"""The rules that leave out legal candidates of a large space."""


def main() -> None:
    """Print the jobs whose id contains all words of the command line, and the means."""
    ratios: dict[bool, dict[str, list[float]]] = {True: defaultdict(list), False: defaultdict(list)}
    for record in _jobs():
        measured, cluster = record["measured"]["step_time_s"], record["cluster"]
        per_node = min(cluster["devices"], cluster["devices_per_node"])
        train = {key: record["train"][key] for key in ("seq_length", "global_batch_size", "precision")}
        network = {key: cluster[key] for key in ("chip", "nic_bytes_per_second") if key in cluster}
        nodes = {"nodes": cluster["devices"] // per_node, "devices_per_node": per_node}
        spec = {"model": record["model"], "cluster": network | nodes, "train": {"engine": "megatron", **train}}
        problem = open_spec(spec, None, (), plan=True).problem
        times = problem.predictions.step_time_s[problem.pruned.open_rows]
        (answer,) = api.estimate_jobs([record])
        step, layout_s = (
            float(problem.predictions.step_time_s[recommended_row(problem)]),
            answer["step_time_s"]["value"],
        )
        legal = len(problem.space) + sum(problem.space.illegal.get(name, 0) for name in BOUNDS)
        place = float((times < layout_s).sum()) / legal
        fitted = "unseen" if record.get("unseen") else "fitted"
        print(
            f"{record['id']}: {fitted}, measured / planned {measured / step:.2f};"
            f" published layout {'fits' if answer['memory']['fits'] else 'too large'}, in the best {place:.1%} of"
            f" {legal:,}, predicted / measured {layout_s / measured:.2f}, {layout_s / step:.3f} of the plan",
            flush=True,
        )
        experts = problem.task.spec.model.num_moe_experts is not None
        ratios[experts][record["source"]].append(measured / step)
    for experts, sources in ratios.items():
        _, low, high = CHOSEN[experts]
        logs = {source: [math.log(each) for each in values] for source, values in sources.items()}
        for left_out in (None, *logs):
            values = [value for source, each in logs.items() if source != left_out for value in each]
            if values:
                mean = sum(values) / len(values)
                spread = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
                name = "experts" if experts else "dense"
                inside = sum(low <= math.exp(value) <= high for value in values)
                figures = f"{math.exp(mean):.3f}, deviation {spread:.3f}, {inside} in {low} to {high}"
                print(f"{name} without {left_out}: {len(values)} jobs, {figures}")


def _jobs() -> Iterator[Mapping[str, Any]]:
    with loaded_plugins(()) as loaded:
        records = [each for each in loaded.published_runs() if each.get("unseen") or "unseen" not in sys.argv]
    fastest: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if record["kind"] != "train" or {"lengths", "adapter"} & record["train"].keys():
            continue
        train, cluster = record["train"], record["cluster"]
        lengths = [train[key] for key in ("seq_length", "global_batch_size", "precision")]
        key = repr((record["model"], cluster["chip"], cluster["devices"], lengths))
        known = fastest.get(key)
        if known is None or known["measured"]["step_time_s"] > record["measured"]["step_time_s"]:
            fastest[key] = record
    for record in fastest.values():
        if all(word in record["id"] for word in sys.argv[1:] if word != "unseen"):
            yield record


if __name__ == "__main__":
    main()
