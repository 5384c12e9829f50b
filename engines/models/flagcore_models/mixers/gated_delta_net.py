"""Gated DeltaNet: linear attention with a gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen3.6."""

from dataclasses import dataclass

from flagcore.domain.model import Mixer, Product


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Mixer):
    """Queries and keys have `key_heads` heads of `key_dim` elements, values and gates `value_heads` of `value_dim`.

    Queries, keys and values pass through a convolution over `kernel` tokens. Each value head has a decay and a rate.
    `element_bytes`: as in `Mamba2` (`mamba_ssm_dtype`).
    Source: megatron-core 0.16 `ssm/gated_delta_net.py`, transformers 5.24 `models/qwen3_next`.
    """

    label = "Gated DeltaNet"

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    element_bytes: int = 0

    @property
    def values(self) -> int:
        """The total width of the values over all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The total width of queries, keys and values, which is the width of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def heads(self) -> int:
        return self.key_heads

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        inputs = Product(inputs=hidden_size, outputs=self.channels + self.values + 2 * self.value_heads)
        return inputs, Product(inputs=self.values, outputs=hidden_size, split="inputs")

    @property
    def other_weights(self) -> int:
        return self.kernel * self.channels + 2 * self.value_heads + self.value_dim

    @property
    def moved(self) -> float:
        """Convolution; queries and keys repeated for each value head, and normalized; four kernels of the recurrence,
        which write the states of chunks and read them; gated norm.

        Source: flash-linear-attention 0.6 `ops/gated_delta_rule/chunk.py`, counted kernel by kernel.
        """
        keys, states, matrices = self._recurrence
        own = 2.0 * self.channels + 2.0 * self.key_heads * self.key_dim
        return own + 12.0 * keys + 9.0 * self.values + 2.0 * states + matrices

    @property
    def moved_back(self) -> float:
        """As `moved`. Kernels repeat the states of chunks, and six more compute gradients."""
        keys, states, matrices = self._recurrence
        own = 3.0 * self.channels + 2.0 * self.key_heads * self.key_dim
        return own + 29.0 * keys + 20.0 * self.values + 4.0 * states + 2.0 * matrices

    @property
    def _recurrence(self) -> tuple[float, float, float]:
        """The elements per token of repeated keys, of states, and of the matrices of chunks."""
        keys = float(self.value_heads * self.key_dim)
        return keys, keys * self.value_dim / self.chunk, float(self.value_heads * self.chunk)

    @property
    def saved(self) -> float:
        """The kernels store the outputs of the input product and of the convolution, normalized queries and keys, a
        `chunk` x `chunk` matrix per value head and chunk, and the outputs of the recurrence and of the gated norm.

        Source: flash-linear-attention 0.4 `ops/gated_delta_rule/chunk.py`, `modules/fused_norm_gate.py`.
        """
        queries_and_keys = self.channels - self.values
        inputs = self.channels + self.values + 2.0 * self.value_heads
        recurrence = queries_and_keys + self.value_heads * (self.chunk + 4.0)
        return inputs + self.channels + recurrence + 2.0 * self.values

    def core_flops(self, tokens: float) -> float:
        """Per head and chunk of C tokens: K K^T and Q K^T, the inverse of a triangle, and products with C x C matrices
        and with the state (arXiv 2412.06464, section 3.3)."""
        chunk, key, value = float(self.chunk), float(self.key_dim), float(self.value_dim)
        inside = 2.0 * chunk * (2.0 * key + key + 2.0 * value) + chunk**2
        return self.value_heads * (inside + 2.0 * 3.0 * key * value)

    @property
    def state_bytes(self) -> float:
        """Matrices, by default in 32 bits, and inputs of the convolution in 16 bits."""
        states = float(self.element_bytes or 4) * self.value_heads * self.key_dim * self.value_dim
        return states + 2.0 * (self.kernel - 1) * self.channels
