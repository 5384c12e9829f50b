"""Inputs to the predictions that all candidates share: the model, and the overheads of an engine by release.

`benchmarks/LOG.md` lists the measured points of the fits. `benchmarks/serving_fit.py` prints most overheads;
`request`, `entry`, `receive` and `reserve` were chosen so that the simulated TTFT matches the same points.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flagcore_importers.programs import release
from flagcore_models.layers import network_counts
from flagcore_models.networks.experts import Experts

from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.physics.roofline import BYTES
from flagcore_serving.job import Load
from flagcore_serving.space.weights import ATTENTION

TOKENIZER = 1.25e-6
"""Seconds per token that a tokenizer takes: 50 ms for 40,000 tokens (TensorRT-LLM pull request 13377). Engines tokenize
one prompt after the other, because tokenizers are not thread-safe (vllm-project/vllm pull request 34789)."""
PIXEL = 25e-9
"""Seconds per pixel to decode and scale an image in one thread: 16 to 29 ns for 256 x 256 to 1920 x 1080 pixels, PNG or
JPEG, with transformers 5.19 on one core of a Xeon, measured on 2026-11-23. vLLM 0.32 has one such thread."""


class SparseKernel(NamedTuple):
    """A kernel of latent attention to the tokens that an indexer selects.

    - `architecture`, `cache`: the chips, and the bytes of a cached element, for which an engine uses it.
    - `least`: the smallest number of query heads of a rank for which it does.
    - `prompts`, `answers`: whether it computes prompts, and tokens of answers.
    - `heads`: the number of query heads of a block. A rank with fewer heads computes as many, with zeros.
    - `rate`: operations per second relative to the chip's peak in 16 bits.
    - `units`: number of units of the chip, if each block is computed on one of them; 0 if blocks are divided.
    - `skips`: whether it skips the places of tokens that a short context does not have.
    """

    architecture: str
    heads: int
    rate: float
    cache: float = 2.0
    least: int = 1
    prompts: bool = True
    answers: bool = True
    units: int = 0
    skips: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Overheads of an engine in addition to large kernels and messages. Times are in seconds.

    Host and front end:

    - `iteration`: time of the host per iteration. `hidden`: the same if it is hidden as long as each process has a CPU.
    - `sequence`: time of the host per iteration and running sequence (sampling, streaming, bookkeeping).
    - `request`: time that a request takes to reach the scheduler.
    - `entry`: time that the front end takes to accept one request. Requests are accepted one after the other.
    - `event`: time in which scheduler and front end handle a token of a sequence, beside the device. An iteration that
      only decodes takes at least as long for each running sequence.
    - `prompt_token`: time per prompt token in the one thread that tokenizes.
    - `receive`: number of iterations between two polls for new requests.

    Times of small kernels per layer (norms, rotation, cache writes, activations, casts, routing), and of messages:

    - `attention`, `ffn`: kernels of an attention layer, and of an FFN.
    - `latent`, `indexer`: additional kernels of latent attention, and of the indexer of sparse attention.
    - `narrows`: the format into which attention is quantized as it is loaded, if a checkpoint with experts in MXFP4
      leaves it in 16 bits; "" if it stays.
    - `compressed`, `selected`: additional kernels of compressed attention, and of its choice of keys, if there are more
      than it chooses: twice the time for more than 128 tokens. `streams`: of the residual streams around a part.
    - `delta_rule`: time of a gated delta rule's kernels relative to that of their memory traffic.
    - `experts`: kernels of a layer with experts, by precision of the weights.
    - `whole_experts`: additional kernels of such a layer if tensor ranks hold whole experts, by precision.
    - `casts`: formats to which separate kernels cast the operands of products. Elsewhere the kernel before casts, too.
    - `reduce`: a small all-reduce between two ranks.
    - `reduce_doubling`: addition to `reduce` for each doubling of the ranks beyond two.
    - `handover`: between two stages of a pipeline, besides the message.
    - `idle_call`: after a call of the scheduler of a pipeline that found nothing to compute.

    Sparse attention:

    - `sparse`: its kernels, the first that applies before others. Without one, it is as fast as other attention.
    - `dense_prompts`: whether prompts of which all tokens are selected are computed as without an indexer.

    Experts:

    - `grouped_share`, `grouped_work`: rates at which the experts' weights are read and multiplied, relative to other
      matrix products.
    - `rows`: the fewest rows that an expert has in such a product, an estimate.
    - `grouped`: fields that replace these for an architecture's kernels, by architecture and format of the weights.
    - `converted`: rate of other products whose weights are converted to 16 bits first, relative to those in 16 bits.
    - `exchanged_share`: factor on both rates if attention ranks exchange their tokens.
    - `sums_prompts`: whether attention ranks exchange prompts by all-reduces of the tokens of all ranks.
    - `copied_from`: the fewest tokens of a pass for which experts in the memory of the host are copied to the devices,
      instead of computed by the host.
    - `spread`: share of an iteration's tokens that choose experts independently of each other.

    Kernels that an iteration launches if it is not a captured graph; the host may then be slower than the device:

    - `eager_kernels`: kernels per layer.
    - `eager_experts`, `eager_latent`, `eager_compressed`: additional kernels per layer with experts, and per layer with
      latent or compressed attention.
    - `launch`: time of the host to launch one; 0 if it is that of the chip's costs.
    - `layer`, `expert_layer`: time of the host for a layer, and additional time for one with experts, if each layer is
      captured in pieces.
    - `captures`: the default limit of captured sequences relative to the most that run.
    - `whole`: whether an iteration that only decodes is one graph by default. Otherwise it is captured in pieces.

    Scheduler and memory:

    - `mixes`: whether iterations combine prompts and decoding. Otherwise prompts have separate iterations, which are
      never captured.
    - `whole_unless_latent`: whether models without latent attention compute whole prompts, in iterations of their own
      with at least as many tokens as the context.
    - `reserve`: share of the remaining answers of running requests for which the cache must have free space, beside
      the whole answer of a request, before this is admitted; it `falls` with each iteration that decodes, to `least`,
      until the engine is idle or preempts. `reserved`: the most tokens of an answer that count for it.
      `reserve_of_ranks`: the factor on these shares with several attention DP ranks.
    - `embeds_on_host`: whether devices have the head, but never the embedding.
    - `activations_beside`: whether the engine's share is one of the memory that is free before it loads weights, and
      covers only these and the cache.
    - `outside`, `outside_of_group`: the most bytes of driver and libraries that the share must hold, and those of each
      communicator. Others are in use before the engine begins to measure.
    - `copied_below`: copies of 16 bits are kept of the product that expands latents to keys and values, for attention
      without this product, if its weights have fewer bytes.
    - `pads_mxfp4`: by architecture, the multiples of rows and of a rank's columns of experts, and the copies of scales.
    - `whole_prompts`: whether each slot keeps its last prompt, and other tiers whole prompts. Otherwise any tokens.
    - `own_order`: whether tiers behind the devices do not refresh what the devices have (see `model/tiers.py`).
    - `loads_by_layer`: whether an iteration computes layers while the cache of later ones is loaded from other tiers.
      Otherwise a request waits until its cache is loaded, and others are computed meanwhile.
    - `own_front_ends`: whether each attention rank has a front end, which accepts requests beside the others.
    - `frees_windows`: whether layers with sliding windows cache only the tokens in their windows.
    - `finds_preempted`: whether a preempted sequence finds those of its cached blocks that were not taken since then.
    - `preempted_last`: whether the sequence of the batch with the fewest tokens is preempted, and waits behind all
      others. Otherwise it is the one that started last, and waits before them.
    - `own_groups`: whether each group of sequences of a pipeline has an even share of those that may run, and admits
      requests regardless of the answers of other groups.
    - `indexes_all`, `caches_reused`: whether layers that share the indexer of another layer cache index keys, too, and
      those that reuse its keys and values have a cache as large as its own.

    - `compared`: factor on both ends of an interval on a chip on which the engine was not fitted, from at least five
      published points of it there. `uncalibrated`: the factor where only matrix products were measured, and that no
      calibration of the user replaces. 0: none is set.

    Adapters:

    - `adapts_tables`: whether slots also have matrices for the embedding and the head.
    - `adapter_moves`: if kernels on CPU cores copy the matrices of an adapter for each token: the seconds to find and
      read an element, and those of a product with the copy in 32 bits, relative to a plain copy of as many bytes.
    - `base_takes_slot`: whether requests without an adapter occupy a slot, too.
    """

    iteration: float
    sequence: float
    request: float
    attention: float
    ffn: float
    hidden: float = 0.0
    entry: float = 0.0
    event: float = 0.0
    prompt_token: float = 0.0
    receive: int = 1
    latent: float = 0.0
    indexer: float = 0.0
    narrows: str = ""
    compressed: float = 0.0
    selected: float = 0.0
    streams: float = 0.0
    delta_rule: float = 1.0
    experts: Mapping[str, float] = field(default_factory=dict)
    whole_experts: Mapping[str, float] = field(default_factory=dict)
    casts: Sequence[str] = ()
    reduce: float = 10e-6
    reduce_doubling: float = 0.0
    handover: float = 0.0
    idle_call: float = 0.0
    sparse: Sequence[SparseKernel] = ()
    dense_prompts: bool = False
    grouped_share: float = 1.0
    grouped_work: float = 1.0
    rows: float = 8.0
    grouped: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    converted: float = 1.0
    exchanged_share: float = 1.0
    sums_prompts: bool = False
    copied_from: float = math.inf
    spread: float = 1.0
    eager_kernels: float = 0.0
    eager_experts: float = 0.0
    eager_latent: float = 0.0
    eager_compressed: float = 0.0
    launch: float = 0.0
    layer: float = 0.0
    expert_layer: float = 0.0
    captures: float = 2.0
    whole: bool = True
    mixes: bool = True
    whole_unless_latent: bool = False
    reserve: float = 0.0
    falls: float = 0.0
    least: float = 0.0
    reserved: float = math.inf
    reserve_of_ranks: float = 1.0
    embeds_on_host: bool = False
    activations_beside: bool = False
    outside: float = math.inf
    outside_of_group: float = 0.0
    copied_below: float = 0.0
    pads_mxfp4: Mapping[str, Sequence[float]] = field(default_factory=dict)
    whole_prompts: bool = False
    own_order: bool = False
    loads_by_layer: bool = False
    own_front_ends: bool = False
    frees_windows: bool = False
    finds_preempted: bool = False
    preempted_last: bool = False
    own_groups: bool = False
    indexes_all: bool = False
    caches_reused: bool = False
    compared: float = 0.0
    uncalibrated: float = 0.0
    adapts_tables: bool = False
    adapter_moves: Sequence[float] = ()
    base_takes_slot: bool = False

    def slowed(self, factor: float) -> Overheads:
        """Return these overheads with the times of the front end multiplied by `factor`."""
        if factor == 1.0:
            return self
        names = ("request", "entry", "prompt_token")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


HOST_RATE = 32e9
"""The rate of the host's link in bytes per second, assumed for chips without a known one: that of PCIe 4.0 x16."""
HOST_MEMORY_RATE = 1.5e11
"""Bytes per second that all cores of a host read from its memory, of which flagcore knows nothing. A choice: two
channels of DDR5-5600 have at most 9e10, eight of DDR4-3200 2e11, and twelve of DDR5-4800 4.6e11."""
DISK_RATE = 5e9
"""Bytes per second that a host reads from its local disks, of which flagcore knows nothing. A choice: a drive with four
lanes of PCIe 4.0 reads at most 7e9."""


class AdaptedRequests(NamedTuple):
    """The requests that use adapters: a share of all, and the share of each adapter among them."""

    share: float = 0.0
    shares: tuple[float, ...] = ()

    @classmethod
    def of(cls, load: Load) -> AdaptedRequests:
        return cls(load.adapter_share, load.adapter_shares) if load.adapters else cls()

    @property
    def number(self) -> int:
        return len(self.shares)

    def different(self, requests: FloatArray) -> FloatArray:
        """Return how many different adapters as many `requests` that use one are expected to use."""
        return np.asarray(sum(1.0 - (1.0 - each) ** requests for each in self.shares))


def distinct_experts(count: FloatArray | float, chosen: FloatArray | float, tokens: FloatArray | float) -> FloatArray:
    """Return how many of `count` experts are expected to be used if each token chooses `chosen` experts at random."""
    return np.asarray(count * (1.0 - (1.0 - chosen / count) ** tokens))


class Serving(NamedTuple):
    """Inputs that all candidates of a task share.

    - `precision`: the format in which the weights are multiplied.
    - `weight_bytes`: bytes per stored weight if the weights are stored in another format; None if they are not.
    - `parts`: the same two of parts with a format of their own (see `Quantization`), and their mean bytes per weight.
    - `wide`: the parts of the model that are stored in 16 bits (see `Quantization`).
    - `head_bytes`: bytes per weight of the head if devices have no embedding; None if they have both, in 16 bits.
    - `link_domain`: number of consecutive devices that are connected without the network.
    - `host_rate`: bytes per second from the memory of the host to a device.
    - `architecture`, `peak`: those of the chip; the peak in 16 bits, in operations per second.
    - `bus_ranks`: most ranks on a bus (PCIe) for which engines use their own all-reduce; infinite if there is no bus.
    - `tokens`, `prompt`: mean tokens of a request and of its prompt. Only sliding windows and mixers depend on them.
    - `adapters`: the requests that use adapters.
    - `draft`: the other model that drafts tokens; None if there is none, or if it is unknown.
    """

    model: Model
    precision: str
    overheads: Overheads
    weight_bytes: float | None = None
    parts: Mapping[str, tuple[str, float | None, float]] = MappingProxyType({})
    wide: frozenset[str] = frozenset()
    head_bytes: float | None = None
    link_domain: int = 8
    host_rate: float = HOST_RATE
    architecture: str = ""
    peak: float = math.nan
    bus_ranks: float = math.inf
    tokens: float = 1.0
    prompt: float = 1.0
    adapters: AdaptedRequests = AdaptedRequests()
    draft: Model | None = None

    @property
    def wide_precision(self) -> str:
        """The 16-bit format of attention scores and values, the output head and the router."""
        return "fp16" if self.precision == "fp16" else "bf16"

    @property
    def experts(self) -> Experts | None:
        """The experts of the layers that have some. None for a model without experts."""
        return next((each for each in network_counts(self.model) if isinstance(each, Experts)), None)

    @property
    def moe_layers(self) -> int:
        """The number of layers with experts."""
        return sum(number for each, number in network_counts(self.model).items() if isinstance(each, Experts))

    def format_of(self, group: str) -> tuple[str, float | None]:
        """Return the format in which weights of a group (see `Product`) are multiplied, and the bytes of a stored one.

        The bytes are None if the weights are stored in this format.
        """
        if found := self.parts.get(group):
            return found[:2]
        is_wide = not group or (group == ATTENTION and ATTENTION in self.wide)
        return self.wide_precision if is_wide else self.precision, self.weight_bytes

    def bytes_of(self, group: str) -> float:
        """Return the bytes of a weight of a group (see `Product`)."""
        if group in self.parts:
            return self.parts[group][2]
        if not group or group in self.wide:
            return 2.0
        precision, stored = self.format_of(group)
        return BYTES.get(precision, 2.0) if stored is None else stored


UNFITTED = Overheads(iteration=0.0, sequence=0.0, request=0.0, attention=0.0, ffn=0.0)
"""Overheads of an engine whose overheads were not fitted. Predicted times are then lower bounds."""


def is_build(name: str) -> bool:
    """Return whether a name is that of an engine's build with another scheduler or kernels, and not of a release."""
    return name.isalpha()


def build_of(releases: Mapping[str, Mapping[str, Any]], version: str | None) -> str:
    """Return the build of `releases` with whose name `version` begins, as in "atom 0.1", or an empty name."""
    return next((name for name in releases if is_build(name) and (version or "").lower().startswith(name)), "")


def overheads_of(releases: Mapping[str, Mapping[str, Any]], version: str | None) -> Overheads:
    """Return the overheads of the release `version`, or of the newest release if the version is unknown.

    `releases`: fields of `Overheads` by the first release to which they apply, the newest first, and by the names of
    builds (see `build_of`).
    """
    newest = (sys.maxsize,)
    number, fields_of_release = release(version or "") or newest, releases.get(build_of(releases, version))
    for since, fields_ in releases.items() if fields_of_release is None else ():
        if is_build(since):
            continue
        fields_of_release = fields_
        if number >= (release(since) or newest):
            break
    if fields_of_release is None:
        return UNFITTED
    kernels = tuple(SparseKernel(**each) for each in fields_of_release.get("sparse", ()))
    return Overheads(**{**fields_of_release, "sparse": kernels})
