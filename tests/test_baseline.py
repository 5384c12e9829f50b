"""The default baseline of the reported gain."""

from dataclasses import replace

from flagcore.contracts import Problem
from flagcore.engines.megatron.adapter import WORKLOAD
from flagcore.tuner.problem import build_problem
from tests import small
from tests.tuner.stages.test_discover import loaded, plugin, spec


def problem(memory_bytes: int | None = None) -> Problem:
    requested = spec()
    cluster = replace(requested.cluster, memory_bytes_per_device=memory_bytes)
    return build_problem(replace(requested, cluster=cluster), loaded(x=plugin(small.CHIP, 8)), WORKLOAD)


def test_the_rule_of_thumb_chooses_a_candidate_that_fits_if_one_does() -> None:
    found = problem()
    used = found.predictions.device_used_bytes
    default = float(used[found.row_of(found.baseline)])
    less = problem(int(default) - 1)
    assert less.predictions.fits[less.row_of(less.baseline)]
