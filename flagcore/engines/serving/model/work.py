"""What an engine computes: the model, how candidates split it, and what the engine adds to kernels, by release.

`docs/serving-model.md` lists the measured points that overheads are fitted to. Most figures are printed by
benchmarks/serving_fit.py; `request`, `entry`, `receive` and `reserve` were chosen so that simulated times to the first
token match the same points.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.engines.serving.common.program import release


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What one engine adds to its kernels and messages. Times are seconds.

    An iteration takes `iteration` more for the host, and `sequence` more for each running sequence (sampling,
    streaming, bookkeeping). A request is on its way for `request` before the scheduler sees it; the front end, one
    process, takes in one each `entry`. `receive` is how many iterations pass between two looks at new requests.

    `attention`, `latent` (latent attention, in addition), `ffn` and `experts` (by precision of the weights) are the
    small kernels of one layer: norms, rotation, cache writes, activations, casts, routing. A small all-reduce takes
    `reduce`, and `reduce_doubling` more for each doubling of the ranks beyond two. `grouped_share` is the rate at which
    experts' weights are read over that of a matrix product's, `grouped_work` the same of their arithmetic. Of the
    tokens of an iteration only the share `spread` chooses experts independently: the others follow them.

    An iteration that is not captured as a graph is launched kernel by kernel, `eager_kernels` of each layer,
    `eager_experts` and `eager_latent` more for each of these kinds; the host may then be slower than the device.

    `mixes`: prompts are computed together with decoding, else in separate iterations, which are never captured.
    `reserve` is the share of its answer for which the cache must have room before a request is admitted.
    `activations_beside`: the engine's share of memory is for weights and cache alone.
    """

    iteration: float
    sequence: float
    request: float
    attention: float
    ffn: float
    entry: float = 0.0
    receive: int = 1
    latent: float = 0.0
    experts: Mapping[str, float] = field(default_factory=dict)
    reduce: float = 10e-6
    reduce_doubling: float = 0.0
    grouped_share: float = 1.0
    grouped_work: float = 1.0
    spread: float = 1.0
    eager_kernels: float = 0.0
    eager_experts: float = 0.0
    eager_latent: float = 0.0
    mixes: bool = True
    reserve: float = 0.0
    activations_beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What all candidates of a task share: the model, the precision of its weights, and the engine's overheads.

    `weight_bytes` are those of one weight in `precision`, where they are not what kernels compute in.
    """

    model: Model
    precision: str
    overheads: Overheads
    weight_bytes: float | None = None

    @property
    def wide_precision(self) -> str:
        """The 16 bits of what is not stored narrower: scores and values of attention, the head, the router."""
        return "fp16" if self.precision == "fp16" else "bf16"

    @property
    def attention_precision(self) -> str:
        """Precision of the projections of attention: checkpoints of experts in 4 bits keep them in 16."""
        narrow = self.precision == "nvfp4" and self.model.num_moe_experts is not None
        return self.wide_precision if narrow else self.precision

    @property
    def moe_layers(self) -> int:
        model = self.model
        return 0 if model.num_moe_experts is None else model.num_layers - model.moe_first_dense_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How candidates split the work: counts, as floats, one element a candidate.

    One instance has `tensor` x `data` x `pipeline` devices; its experts are spread over `expert` groups of the first
    two. Iterations of up to `captured` tokens are graphs, and one pass through the model takes `pass_tokens` at most.
    `cores` devices work on each tensor rank's share together. `cache_bytes` are those of one value in the cache.
    """

    tensor: FloatArray
    data: FloatArray
    expert: FloatArray
    pipeline: FloatArray
    instances: FloatArray
    cores: FloatArray
    captured: FloatArray
    pass_tokens: FloatArray
    cache_bytes: FloatArray

    @property
    def column(self) -> Split:
        """The same, to broadcast over the nodes of a table."""
        return Split(**{each.name: getattr(self, each.name)[:, None] for each in fields(self)})


Releases = Mapping[str, Overheads]
"""Overheads by the release from which on they hold, the newest first."""

UNFITTED = Overheads(iteration=0.0, sequence=0.0, request=0.0, attention=0.0, ffn=0.0)
"""For an engine without its own figures: its kernels alone, so times are lower bounds."""


def overheads_of(releases: Releases, version: str | None) -> Overheads:
    """Return the overheads of a release; without a version those of the newest."""
    newest = (sys.maxsize,)
    number, found = release(version or "") or newest, UNFITTED
    for since, overheads in releases.items():
        found = overheads
        if number >= (release(since) or newest):
            break
    return found
