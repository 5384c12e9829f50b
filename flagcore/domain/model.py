"""The architecture of a transformer."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The vision tower of a model: a transformer over image patches.

    `full_layers`: the number of layers that attend to the whole image. The others attend to windows of `window_size`
    pixels per side.
    `patch_size`: pixels per side of a patch.
    `mergers`: the number of merger networks. Each merges `merge_size` x `merge_size` patches into one prompt token.
    `min_pixels` and `max_pixels`: an image is scaled to a size in this range, with sides that are multiples of
    `patch_size` x `merge_size`.
    `channels`: input values per pixel. The default is three color channels times two frames, because the tower reads an
    image as two identical frames.
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
        """Return the number of prompt tokens of an image of `width` x `height` pixels, without start and end tokens.

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
        """The number of prompt tokens of the largest image."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    @property
    def layer_weights(self) -> float:
        """The number of weights in all layers."""
        matrices = 3 if self.gated_linear_unit else 2
        return float(self.num_layers * (4 * self.hidden_size**2 + matrices * self.hidden_size * self.ffn_hidden_size))

    @property
    def merger_weights(self) -> float:
        """The number of weights in all mergers. Each merger has two matrices."""
        merged = self.hidden_size * self.merge_size**2
        return float(self.mergers * merged * (merged + self.output_size))

    @property
    def weights(self) -> float:
        """The number of weights in the tower: layers, mergers and patch embedding."""
        return self.layer_weights + self.merger_weights + self.channels * self.patch_size**2 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Layers with sliding-window attention, which attend only to the last `tokens` tokens."""

    num_layers: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556).

    Each layer has an indexer with `heads` heads of `head_dim` elements, which scores all tokens. Attention then uses
    only the `top_k` tokens with the highest scores. The indexer caches one key per token, with 8 bits per element and
    a 32-bit scale per 128 elements.
    """

    heads: int
    head_dim: int
    top_k: int

    @property
    def token_bytes(self) -> float:
        """The bytes per token in the indexer cache of one layer."""
        return self.head_dim * (1.0 + 4.0 / 128.0)

    def weights(self, hidden_size: int, query_rank: int) -> int:
        """Return the number of indexer weights in one layer.

        `query_rank`: the width of the input from which the queries are computed.
        """
        return query_rank * self.heads * self.head_dim + hidden_size * (self.head_dim + self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers with gated linear attention (Gated DeltaNet, arXiv 2412.06464), whose state has a fixed size.

    Queries and keys have `key_heads` heads of `key_dim` elements. Values and their gates have `value_heads` heads of
    `value_dim` elements. Queries, keys and values first pass through a convolution over `kernel` tokens.
    """

    num_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def values(self) -> int:
        """The total width of the values over all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The total width of queries, keys and values, which is the width of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.values

    def weights(self, hidden_size: int) -> int:
        """Return the number of weights in one layer: input projections, gates, decays, convolution and output."""
        inputs = self.channels + self.values + 2 * self.value_heads
        return hidden_size * (inputs + self.values) + self.kernel * self.channels

    @property
    def state_bytes(self) -> float:
        """The bytes of one layer's state for one sequence.

        The state consists of matrices in 32 bits (`mamba_ssm_dtype` of Qwen3.5) and convolution inputs in 16 bits.
        """
        return 4.0 * self.value_heads * self.key_dim * self.value_dim + 2.0 * (self.kernel - 1) * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The architecture of a transformer. Sizes are numbers of elements. All defaults are filled in.

    In a model without MLA or without MoE, the sizes of that feature are None, and its numbers of layers are 0.

    `ffn_hidden_size`: the FFN width of a dense layer.
    `moe_ffn_hidden_size`: the width of one routed expert.
    `moe_shared_expert_intermediate_size`: the total width of the shared experts.
    `vision`: the vision tower. None if the model has no known one.
    `windows`, `linear_attention`: the layers with these kinds of attention. All other layers attend to all tokens, or
    to the tokens that the `indexer` selects.
    `attention_output_gate`: whether a gate scales the output of attention. It is computed by a projection as large as
    the query projection.
    `unread`: the names and values of the keys of config.json that the other fields do not contain.
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
    moe_router_num_groups: int = 0
    moe_router_group_topk: int = 0
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
    windows: Windows | None = None
    indexer: Indexer | None = None
    linear_attention: LinearAttention | None = None
    attention_output_gate: bool = False
    unread: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def attention_layers(self) -> int:
        """The number of layers with a KV cache."""
        return self.num_layers - (self.linear_attention.num_layers if self.linear_attention else 0)

    @property
    def is_inline(self) -> bool:
        """Whether an inline shape in a spec or a job record can describe the model completely."""
        parts = (self.vision, self.windows, self.indexer, self.linear_attention, self.attention_output_gate)
        return not any(parts)
