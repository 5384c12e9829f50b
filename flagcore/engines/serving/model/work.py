"""Inputs of the serving model: the model, its split, and the overheads of an engine by release.

`benchmarks/README.md` lists the measured points of the fits. `benchmarks/serving_fit.py` prints most overheads;
`request`, `entry`, `receive` and `reserve` were chosen so that the simulated TTFT matches the same points.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.engines.serving.space.installed import release

TOKENIZER = 1.25e-6
"""Seconds per token of a tokenizer: 50 ms for 40,000 tokens (TensorRT-LLM pull request 13377). Engines serialize
it, because tokenizers are not safe for threads (vllm-project/vllm pull request 34789)."""
PIXEL = 25e-9
"""Seconds per pixel of decoding and scaling an image in one thread: 16 to 29 ns for 256 x 256 to 1920 x 1080 pixels,
PNG or JPEG, with transformers 5.19 on one core of a Xeon, measured on 2026-11-23. vLLM 0.32 has one such thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Overheads of an engine in addition to kernels and messages, in seconds.

    Each iteration adds `iteration` for the host, and `sequence` for each running sequence (sampling, streaming,
    bookkeeping). A request takes `request` to reach the scheduler; the front end accepts one request per `entry`, and
    then one thread needs `prompt_token` for each token of a prompt.
    `receive` is the number of iterations between two polls for new requests.

    `attention`, `latent` (latent attention, in addition), `ffn` and `experts` (by precision of the weights) are the
    small kernels of one layer: norms, rotation, cache writes, activations, casts, routing. A small all-reduce takes
    `reduce`, plus `reduce_doubling` for each doubling of the ranks beyond two. `grouped_share` is the rate of reading
    experts' weights relative to other matrix products, `grouped_work` the relative rate of their arithmetic. Both are
    multiplied by `exchanged_share` if attention ranks exchange their tokens. Only the share `spread` of an iteration's
    tokens chooses experts independently.

    An iteration that is not a captured graph launches `eager_kernels` kernels per layer, plus `eager_experts` and
    `eager_latent` for such layers; the host may then be slower than the device.

    With `mixes` iterations combine prompts and decoding; otherwise prompts have separate iterations, which are never
    captured. `reserve` is the share of its answer for which the cache must have free space to admit a request. With
    `activations_beside` the engine's share of memory covers only weights and cache. With `frees_windows` the cache of
    layers with windows has only their windows.
    """

    iteration: float
    sequence: float
    request: float
    attention: float
    ffn: float
    entry: float = 0.0
    prompt_token: float = 0.0
    receive: int = 1
    latent: float = 0.0
    experts: Mapping[str, float] = field(default_factory=dict)
    reduce: float = 10e-6
    reduce_doubling: float = 0.0
    grouped_share: float = 1.0
    grouped_work: float = 1.0
    exchanged_share: float = 1.0
    spread: float = 1.0
    eager_kernels: float = 0.0
    eager_experts: float = 0.0
    eager_latent: float = 0.0
    mixes: bool = True
    reserve: float = 0.0
    activations_beside: bool = False
    frees_windows: bool = False

    def slowed(self, factor: float) -> Overheads:
        """Return these overheads with a front end that is slower by a factor."""
        if factor == 1.0:
            return self
        names = ("request", "entry", "prompt_token")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Inputs that all candidates of a task share: the model, the precision of its weights, and the engine's overheads.

    `weight_bytes` is the stored size of a weight if the weights are only stored in this format. Requests have `tokens`
    tokens, `prompt` of them in the prompt; only windows and linear attention need both.
    """

    model: Model
    precision: str
    overheads: Overheads
    weight_bytes: float | None = None
    tokens: float = 1.0
    prompt: float = 1.0

    @property
    def wide_precision(self) -> str:
        """The 16-bit precision of attention scores and values, the output head and the router."""
        return "fp16" if self.precision == "fp16" else "bf16"

    @property
    def attention_precision(self) -> str:
        """Precision of the attention projections: 4-bit checkpoints with experts keep them in 16 bits."""
        narrow = self.precision == "nvfp4" and self.model.num_moe_experts is not None
        return self.wide_precision if narrow else self.precision

    @property
    def moe_layers(self) -> int:
        model = self.model
        return 0 if model.num_moe_experts is None else model.num_layers - model.moe_first_dense_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The split of the work: float counts, one element per candidate.

    One instance has `tensor` x `data` x `pipeline` devices; the tensor and data ranks form `expert` groups of experts.
    Iterations of up to `captured` tokens are graphs, and one pass through the model has at most `pass_tokens`. On CPUs
    `cores` work together on each rank. `cache_bytes` is the size of a cached value. `crowding` is the number of the
    engine's busy processes per CPU of a host, at least 1: times of the host are longer by this factor.
    """

    tensor: FloatArray
    data: FloatArray
    expert: FloatArray
    pipeline: FloatArray
    cores: FloatArray
    captured: FloatArray
    pass_tokens: FloatArray
    cache_bytes: FloatArray
    crowding: FloatArray

    @property
    def communicators(self) -> FloatArray:
        """The number of communicators of a rank: of the instance, and of each parallel group with several ranks."""
        ranks = self.tensor * self.data * self.pipeline
        groups = (ranks, self.tensor, self.data, self.pipeline, self.expert)
        count: FloatArray = np.sum([np.where(size > 1.0, 1.0, 0.0) for size in groups], axis=0)
        return count

    @property
    def column(self) -> Split:
        """This split with a second axis, which broadcasts over `NODES`."""
        return Split(**{each.name: getattr(self, each.name)[:, None] for each in fields(self)})


UNFITTED = Overheads(iteration=0.0, sequence=0.0, request=0.0, attention=0.0, ffn=0.0)
"""Overheads of an engine that was not fitted: predicted times are lower bounds."""


def overheads_of(releases: Mapping[str, Mapping[str, Any]], version: str | None) -> Overheads:
    """Return the overheads of a release, without a version those of the newest release.

    `releases` are the fields of overheads by the first release to which they apply, the newest first.
    """
    newest = (sys.maxsize,)
    number, found = release(version or "") or newest, None
    for since, fields_ in releases.items():
        found = fields_
        if number >= (release(since) or newest):
            break
    return UNFITTED if found is None else Overheads(**found)
