"""The architecture of a transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The vision tower of a model: a transformer over patches of `patch_size` pixels per side.

    `merge_size` squared patches become one token of the prompt, by each of `mergers` networks. An image is scaled to
    `min_pixels` to `max_pixels`, and its sides to multiples of merged patches. Only `full_layers` layers attend to the
    whole image, the others to windows of `window_size` pixels per side. `channels` are the values per pixel of an
    image and its copy, which the tower takes as two frames.
    """

    num_layers: int
    full_layers: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int
    gated_linear_unit: bool
    output_size: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    window_size: int = 0
    mergers: int = 1
    channels: int = 6

    def tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image of `width` x `height` pixels in the prompt, without start and end.

        Source: `smart_resize` in transformers 5.19 `models/qwen2_vl/image_processing_qwen2_vl.py`.
        """
        side = self.patch_size * self.merge_size
        columns, rows = round(width / side), round(height / side)
        if columns * rows * side**2 > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            columns, rows = (max(1, math.floor(each / scale / side)) for each in (width, height))
        elif columns * rows * side**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            columns, rows = (math.ceil(each * scale / side) for each in (width, height))
        return columns * rows

    @property
    def max_tokens(self) -> int:
        """The tokens of the largest image."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    @property
    def layer_weights(self) -> float:
        """The number of weights of all layers."""
        matrices = 3 if self.gated_linear_unit else 2
        return float(self.num_layers * (4 * self.hidden_size**2 + matrices * self.hidden_size * self.ffn_hidden_size))

    @property
    def merger_weights(self) -> float:
        """The number of weights of all mergers: two matrices each."""
        merged = self.hidden_size * self.merge_size**2
        return float(self.mergers * merged * (merged + self.output_size))

    @property
    def weights(self) -> float:
        """The number of weights."""
        return self.layer_weights + self.merger_weights + self.channels * self.patch_size**2 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The architecture of a transformer. Sizes are numbers of elements; defaults are resolved.

    `ffn_hidden_size` is the FFN width of a dense layer, `moe_ffn_hidden_size` the width of a routed expert,
    `moe_shared_expert_intermediate_size` the total width of the shared experts. If a model has no MLA or MoE, its sizes
    are None; numbers of layers are 0. `vision` is None for a model without a known vision tower.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    gated_linear_unit: bool = True
    untie_embeddings_and_output_weights: bool = True
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    num_moe_experts: int | None = None
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_first_dense_layers: int = 0
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    mtp_num_layers: int = 0
    vision: Vision | None = None
