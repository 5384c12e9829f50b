"""The architecture of a transformer."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flagcore.domain.space import FloatArray


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


@dataclass(frozen=True, slots=True)
class Output:
    """A part of a product's outputs that checkpoints store as a linear layer of its own.

    `name`: that of the layer, which adapters target. `width`: its outputs. `units`: the heads of which each
    tensor-parallel rank has at least one. 0: ranks divide the width.
    """

    name: str
    width: int
    units: int = 0

    def on(self, ranks: FloatArray | float) -> FloatArray | float:
        """Return the outputs of one of `ranks` tensor-parallel ranks, of which several may have the same head."""
        if not self.units:
            return self.width / ranks
        return np.maximum(self.units / ranks, 1.0) * (self.width / self.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product Y[tokens, outputs] = X[tokens, inputs] W[inputs, outputs] of a layer, which one kernel computes.

    `split`: the size that tensor-parallel ranks divide, "outputs" or "inputs". Empty if each rank computes the whole
    product.
    `name`: what engines with a kernel of their own for it call it. Most products have none.
    `joined`: the linear layers that it joins. By default it is one.
    `bias`: whether its outputs have biases.
    `copies`: how many of them a layer has: one for each expert.
    `adapts`: whether low-rank adapters may be beside it.
    `component`: the part of a layer to which memory and time of training count it.
    `group`: the part of a model whose weights a checkpoint quantizes alike. Empty: they keep 16 bits.
    """

    inputs: int
    outputs: int
    split: str = "outputs"
    name: str = ""
    joined: tuple[Output, ...] = ()
    bias: bool = False
    copies: int = 1
    adapts: bool = True
    component: str = "mixers"
    group: str = "attention"

    @property
    def weights(self) -> int:
        """The number of weights of all copies, without biases."""
        return self.copies * self.inputs * self.outputs

    @property
    def biases(self) -> int:
        return self.bias * self.copies * self.outputs

    @property
    def layers(self) -> tuple[Output, ...]:
        """The linear layers that the product joins, or the only one, by its place."""
        return self.joined or (Output("out_proj" if self.split == "inputs" else "in_proj", self.outputs),)

    def inner(self, ranks: FloatArray | float) -> FloatArray | float:
        """Return the inputs on one of `ranks` tensor-parallel ranks."""
        return self.inputs / ranks if self.split == "inputs" else self.inputs + 0.0 * ranks

    def outer(self, ranks: FloatArray | float) -> FloatArray | float:
        """Return the outputs on one of `ranks` tensor-parallel ranks, of which several may have the same heads."""
        if self.split != "outputs":
            return self.outputs + 0.0 * ranks
        return sum((each.on(ranks) for each in self.joined), 0.0 * ranks) if self.joined else self.outputs / ranks


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a layer, between two residual streams: a mixer or a feed-forward network (`kind`: "dense", "experts"),
    or a part of a model outside of them (norms, tables).

    Subclasses are one file each, with the sources of their formulas. All numbers are for one layer of the whole model.
    """

    label: ClassVar[str] = ""
    kind: ClassVar[str] = ""

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        """Return the matrix products of a layer between residual streams of `hidden_size` elements."""
        raise NotImplementedError

    @property
    def other_weights(self) -> int:
        """The number of weights in no product that tensor-parallel ranks divide: convolutions, decays, their norms."""
        return 0

    @property
    def norms(self) -> tuple[int, ...]:
        """The widths of the norms inside the part, which each rank has whole. The norm before it is not included."""
        return ()

    @property
    def norm_weights(self) -> int:
        """The number of weights of these norms."""
        return sum(self.norms)


@dataclass(frozen=True, kw_only=True)
class Network(Part):
    """A feed-forward network of `width` elements. `gated`: whether its activation function has a gate."""

    kind: ClassVar[str] = "dense"

    width: int
    gated: bool = True

    @property
    def active_width(self) -> int:
        """The width through which each token passes."""
        return self.width


@dataclass(frozen=True, kw_only=True)
class Mixer(Part):
    """How the layers of one kind mix tokens.

    Tensor-parallel ranks divide all numbers but products without a split. The defaults are those of a layer without a
    cache, a state or scores.
    """

    kind: ClassVar[str] = "mixer"
    chunk: ClassVar[int] = 64
    """Tokens between two states that kernels store, where they process a sequence in chunks."""

    recurrent: ClassVar[bool] = True
    """Whether the state holds all tokens before, so that it cannot be cut. Otherwise it is the cache of a window."""

    @property
    def heads(self) -> int:
        """The number of heads, which tensor-parallel ranks must divide."""
        raise NotImplementedError

    @property
    def moved(self) -> float:
        """Elements of 16 bits per token that kernels other than products read and write in a forward pass."""
        return 0.0

    @property
    def moved_back(self) -> float:
        """The same in a backward pass. The default is an estimate."""
        return 2.5 * self.moved

    @property
    def saved(self) -> float:
        """Elements of 16 bits per token that fused kernels store for the backward pass, inputs of products included.

        The layer's own input, and the input of its norm, are not included.
        """
        raise NotImplementedError

    def core_flops(self, tokens: float) -> float:
        """Return the flops per token of the forward pass outside products, in a sequence of `tokens` tokens."""
        return 0.0

    @property
    def state_bytes(self) -> float:
        """The bytes of the state of one sequence, whatever its length."""
        return 0.0

    def token_bytes(self, element_bytes: float) -> float:
        """Return the bytes per cached token, in a cache with elements of `element_bytes` bytes."""
        return 0.0

    def read(self, tokens: float) -> float:
        """Return how many cached tokens' bytes are read for a token after `tokens` tokens."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer: its mixer and its feed-forward network. None: it has none.

    `repeats`: whether it runs the weights of an earlier layer again, with a cache of its own.
    """

    mixer: Mixer | None
    network: Network | None
    repeats: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """The mixer and the network, each of which has a norm before it and a residual sum after it."""
        return tuple(each for each in (self.mixer, self.network) if each is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The architecture of a transformer. Sizes are numbers of elements. All defaults are filled in.

    In a model without MLA or without MoE, the sizes of that feature are None, and its numbers of layers are 0.

    `ffn_hidden_size`: the FFN width of a dense layer.
    `moe_ffn_hidden_size`: the width of one routed expert.
    `moe_shared_expert_intermediate_size`: the total width of the shared experts.
    `vision`: the vision tower. None if the model has no known one.
    `layers`: all layers in order. Empty if all of them attend to all tokens, and all but `moe_first_dense_layers` of
    those of a model with experts have them: then they follow from the other fields.
    `moe_latent_size`: the width between which and their own width routed experts project, if it is not `hidden_size`.
    `attention_output_gate`: whether a gate scales the output of attention. It is computed by a projection as large as
    the query projection.
    `layer_embedding_size`: the width of the embeddings that each layer has of its own (Gemma 3n). 0: none.
    `logit_cap_bytes`: the bytes of each logit that a soft cap keeps for the backward pass in 16 bits. 0: no cap.
    `residual_streams`: the number of residual streams, which hyper-connections before and after each mixer and
    feed-forward network mix, with `residual_weights` weights (arXiv 2512.24880).
    `mtp_use_repeated_layer`: whether all depths of multi-token prediction share the weights of one.
    `moe_bias`: whether the products of experts have biases.
    `mtp_dense`: whether these depths have no experts, though other layers do.
    `family`: the `model_type` of its config.json. Empty: not known.
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
    moe_latent_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_first_dense_layers: int = 0
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    mtp_num_layers: int = 0
    mtp_use_repeated_layer: bool = False
    mtp_dense: bool = False
    moe_bias: bool = False
    vision: Vision | None = None
    layers: tuple[Layer, ...] = field(default=(), repr=False)
    attention_output_gate: bool = False
    layer_embedding_size: int = 0
    logit_cap_bytes: int = 0
    residual_streams: int = 1
    residual_weights: int = 0
    family: str = field(default="", compare=False, repr=False)
    unread: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def experts(self) -> int:
        """The number of routed experts of a layer that has some. 0 for a model without experts."""
        return self.num_moe_experts or 0

    @property
    def is_inline(self) -> bool:
        """Whether an inline shape in a spec or a job record can describe the model completely."""
        return not (
            self.vision
            or self.layers
            or self.attention_output_gate
            or self.moe_latent_size
            or self.layer_embedding_size
            or self.logit_cap_bytes
            or self.residual_streams > 1
            or (self.v_head_dim and not self.multi_latent_attention)
        )
