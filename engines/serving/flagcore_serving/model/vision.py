"""Time and memory of the vision tower, which turns images into tokens of the prompt.

A tower is a transformer without a cache (Qwen2.5-VL, arXiv 2502.13923, section 2.1; Qwen2-VL, arXiv 2409.12191).
Engines run it without captured graphs, on the first stage of a pipeline, before the iteration that computes the prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from flagcore_models.parts.tower import VisionTower

from flagcore.contracts import AttentionShape, Costs
from flagcore.domain.model import Product, Vision
from flagcore.domain.space import FloatArray
from flagcore_serving.load.images import RequestImages
from flagcore_serving.model.work import PIXEL, Serving
from flagcore_serving.space.settings import Settings

REFERENCE_PATCHES = 4096.0
"""Number of patches for which a tower's rates are computed. A choice: those of an image with 0.8 megapixels."""
KERNELS = 14.0
"""Kernel launches per layer, an estimate: two norms, five products, rotation, attention, activation, two sums, two
copies."""


class ImageWork(NamedTuple):
    """The work for the images of a request: numbers of patches, query-key pairs over all layers, images, pixels, and
    tokens."""

    patches: float
    pairs: float
    images: int
    pixels: int
    tokens: float = 0.0

    @property
    def read_s(self) -> float:
        """The seconds that one thread of the front end takes to decode and scale the images."""
        return PIXEL * self.pixels


def image_work(images: RequestImages, vision: Vision) -> list[ImageWork]:
    """Return the work for the images of each request. In most layers a patch attends only to its window."""
    work = list[ImageWork]()
    windowed = vision.num_layers - vision.full_layers
    for request in images:
        patches = np.array([vision.tokens(*image[:2]) * vision.merge_size**2 for image in request], dtype=np.float64)
        window = np.minimum(patches, (vision.window_size / vision.patch_size) ** 2)
        pairs = float((patches * (vision.full_layers * patches + windowed * window)).sum())
        pixels = sum(image.width * image.height for image in request)
        tokens = float(patches.sum()) / vision.merge_size**2
        work.append(ImageWork(float(patches.sum()), pairs, len(request), pixels, tokens))
    return work


class EncoderCosts(NamedTuple):
    """The costs of a vision tower in seconds, for each candidate.

    `patch`, `pair`: seconds per patch and per query-key pair. `floor`: the minimum time for the images of a request.
    `ranks`: the number of ranks that work on different images at the same time.
    """

    patch: FloatArray
    pair: FloatArray
    floor: FloatArray
    ranks: FloatArray

    def seconds(self, row: int, work: Sequence[ImageWork]) -> list[float]:
        """Return the seconds that the candidate in `row` takes for the images of each request."""
        patch, pair, floor, ranks = (float(each[row]) for each in (self.patch, self.pair, self.floor, self.ranks))
        return [
            max((patch * each.patches + pair * each.pairs) / min(ranks, each.images), floor) if each.images else 0.0
            for each in work
        ]


@dataclass(frozen=True, slots=True)
class Encoders:
    """The instances that encode images for one lane and for others.

    - `seconds`: a function that returns the seconds of an instance's tower for the images of each request.
    - `count`: the number of instances, among which the images of a request are divided.
    - `per_lane`: the number of instances per lane, which may be a fraction.
    - `token_s`: seconds to send the embedding of an image's token to the instance that computes the prompt.

    Together they are treated as one server that works `per_lane` times as fast. A request still takes at least the time
    of its images on `count` instances. Decoding the images, in one thread of each front end, overlaps the tower.
    """

    seconds: Callable[[Sequence[ImageWork]], list[float]]
    count: int
    per_lane: float
    token_s: float

    def times(self, images: Sequence[ImageWork]) -> list[tuple[float, float, float]]:
        """Return, for each request, the seconds that it occupies the server, those that its images take at least, and
        those to send their embeddings."""
        return [
            (
                max(work.read_s, encode) / self.per_lane,
                (work.read_s + encode) / max(min(self.count, work.images), 1),
                self.token_s * work.tokens,
            )
            for work, encode in zip(images, self.seconds(images), strict=True)
        ]


def encoder_costs(vision: Vision, serving: Serving, settings: Settings, costs: Costs) -> EncoderCosts:
    """Return the costs of a vision tower. `settings.tower_shares` ranks split its weights: all tensor ranks, or one.

    Matrix products run in 16 bits. Ranks that split the weights add up their results after attention and after the FFN.
    """
    kernels, precision, hidden = costs.kernels, serving.wide_precision, float(vision.hidden_size)
    shares = np.maximum(np.where(np.isinf(settings.tower_shares), 1.0, settings.tower_shares), 1.0)
    ones, tokens = np.ones_like(shares), np.full_like(shares, REFERENCE_PATCHES)

    def seconds(rows: FloatArray, products: Sequence[Product]) -> FloatArray:
        sizes = ((each.outer(shares) * ones, each.inner(shares) * ones) for each in products)
        return sum((kernels.gemm_seconds(rows, *each, precision) for each in sizes), np.zeros_like(shares))

    tower = VisionTower(vision=vision)
    *_attention, up, down = tower.layer_products
    traffic = tokens * 2.0 * (8.0 * hidden + up.outer(shares) + down.inner(shares))  # of norms, sums and activation
    layer = seconds(tokens, tower.layer_products) + kernels.memory_seconds(traffic)
    stride = np.ones(shares.shape, dtype=np.int64)
    payload = tokens * 2.0 * hidden
    reduce = costs.collectives.seconds("all_reduce", payload, shares.astype(np.int64), stride)
    layer = layer + np.where(shares > 1.0, 2.0 * reduce, 0.0)
    merger = seconds(tokens / vision.merge_size**2, tower.merging)
    heads, dim = np.maximum(vision.num_heads / shares, 1.0), hidden / vision.num_heads * ones
    shape = AttentionShape(batch=ones, heads=heads, groups=heads, queries=tokens, keys=tokens, head_dim=dim)
    # the modelled kernel is causal and computes only half of the pairs, but a tower needs all
    pair = 2.0 * kernels.attention_seconds(shape, precision) / REFERENCE_PATCHES**2
    floor = KERNELS * vision.num_layers * kernels.launch_seconds() * settings.crowding
    return EncoderCosts(
        patch=(vision.num_layers * layer + vision.mergers * merger) / REFERENCE_PATCHES / settings.cores,
        pair=pair / settings.cores,
        floor=np.zeros_like(shares) if costs.synchronous else floor * ones,
        ranks=np.where(shares < settings.tensor, settings.tensor, 1.0),
    )


def tower_bytes(vision: Vision, shares: FloatArray, batched_tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the bytes of a tower's weights and of its peak activations on a device, in 16 bits.

    Engines reserve memory for the largest image, or for images of `batched_tokens` tokens (vLLM 0.32:
    `multimodal/encoder_budget.py`); towers without mergers take few images at once (vLLM 0.20 and 0.24:
    `models/gemma4_mm.py`). `shares`: the number of ranks that split the weights; infinity if the tower is not loaded.
    """
    patches, *_layers = VisionTower(vision=vision).products(vision.output_size)
    *_attention, up, down = VisionTower(vision=vision).layer_products
    tokens = np.maximum(batched_tokens * (vision.mergers > 0), float(vision.max_tokens))
    ranks = np.where(np.isinf(shares), 1.0, np.maximum(shares, 1.0))
    layer = patches.inputs + 3.0 * vision.hidden_size + up.outer(ranks) + down.inner(ranks)
    activations = 2.0 * tokens * (vision.merge_size**2 * layer + vision.mergers * vision.output_size)
    return 2.0 * VisionTower(vision=vision).weights / shares, np.where(np.isinf(shares), 0.0, activations)
