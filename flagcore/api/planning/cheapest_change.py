"""The cheapest change with which a job fits, if no candidate of its spec does."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from flagcore.api.common.inputs import loaded_plugins
from flagcore.contracts import Workload
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import Spec
from flagcore.errors import FlagError
from flagcore.i18n import _
from flagcore.problem import Problem, build_problem, rows_by_time

DOUBLINGS = 4
"""How often the number of nodes is doubled."""


def cheapest_change(problem: Problem, workload: Workload, without: Collection[str]) -> str:
    """Return the first change with which a candidate is left: other knobs, then more devices or nodes.

    Empty if none of them helps and candidates fit, because then rules remove them.
    """
    task = problem.platform.task
    with loaded_plugins(without) as loaded:
        for change, spec in _changes(task.spec, task.cluster.groups[0].chip.devices_per_node):
            try:
                changed = build_problem(spec, loaded, workload, plan=True)
            except FlagError:
                continue
            if changed.pruned.open_rows.size:
                candidate = changed.set_knobs(changed.space.candidate(int(rows_by_time(changed)[0])))
                return _("with {change}, this candidate fits: {candidate}", change=change, candidate=candidate)
    if problem.predictions.fits.any():  # rules are the reason
        return ""
    nodes = task.cluster.groups[0].nodes << DOUBLINGS
    return _("neither other knobs nor up to {nodes} nodes help: use a chip with more memory", nodes=nodes)


def _changes(spec: Spec, most: int) -> Iterator[tuple[str, Spec]]:
    """Yield descriptions of changes and the changed specs, the cheapest first.

    `most` is the number of devices of a whole node.
    """
    work = replace(spec.work, default_space=True) if isinstance(spec.work, ServeSpec) else spec.work
    widest = replace(spec, space={}, baseline=None, work=work)
    if spec.space:
        yield _("all knobs in the space"), widest
    if spec.cluster.groups:
        return
    devices = spec.cluster.devices_per_node or most
    while (devices := 2 * devices) <= most and spec.cluster.nodes == 1:
        cluster = replace(spec.cluster, devices_per_node=devices)
        yield _("cluster.devices_per_node = {devices}", devices=devices), replace(widest, cluster=cluster)
    for doubling in range(1, DOUBLINGS + 1):
        nodes = spec.cluster.nodes << doubling
        cluster = replace(spec.cluster, nodes=nodes, hosts=())
        yield _("cluster.nodes = {nodes}", nodes=nodes), replace(widest, cluster=cluster)
