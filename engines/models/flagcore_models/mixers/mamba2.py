"""Mamba-2: a selective state space with one decay per head (arXiv 2405.21060), as in Nemotron-H and Granite 4."""

from dataclasses import dataclass

from flagcore.domain.model import Mixer, Product


@dataclass(frozen=True, kw_only=True)
class Mamba2(Mixer):
    """`num_heads` heads of `head_dim` elements, each with a state of `head_dim` x `state_size` elements.

    The heads of one of `groups` groups share the `state_size` inputs and outputs of their states. Inputs of heads and
    states pass through a convolution over `kernel` tokens. `element_bytes`: the bytes of an element of a state that the
    model's config.json sets (`mamba_ssm_cache_dtype`). 0: none; then engines choose, mostly 4.
    Source: megatron-core 0.16 `ssm/mamba_mixer.py`, mamba-ssm 2.2 `ops/triton/ssd_combined.py`.
    """

    label = "Mamba-2"
    chunk = 128

    num_heads: int
    head_dim: int
    state_size: int
    groups: int = 8
    kernel: int = 4
    element_bytes: int = 0

    @property
    def width(self) -> int:
        """The total width of the heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """The width of the convolution: heads, and inputs and outputs of states."""
        return self.width + 2 * self.groups * self.state_size

    @property
    def heads(self) -> int:
        return self.groups

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        inputs = Product(inputs=hidden_size, outputs=self.width + self.channels + self.num_heads)
        return inputs, Product(inputs=self.width, outputs=hidden_size, split="inputs")

    @property
    def other_weights(self) -> int:
        return (self.kernel + 1) * self.channels + 3 * self.num_heads + self.width

    @property
    def moved(self) -> float:
        """Convolution; four kernels of the scan, which write the states of chunks and the scores inside chunks, and
        read them; gated norm. Counted kernel by kernel, with 2 elements for one of 32 bits."""
        inputs, states, scores = self._scan
        return 2.0 * self.channels + 6.0 * self.width + 4.0 * inputs + 6.0 * states + 4.0 * scores

    @property
    def moved_back(self) -> float:
        """As `moved`. Kernels repeat convolution, scores and states, and nine more compute gradients."""
        inputs, states, scores = self._scan
        return 5.0 * self.channels + 16.5 * self.width + 19.0 * inputs + 17.0 * states + 14.0 * scores

    @property
    def _scan(self) -> tuple[float, float, float]:
        """The elements per token of inputs of states, of states, and of scores inside chunks."""
        inputs, states = self.groups * self.state_size, self.width * self.state_size / self.chunk
        return float(inputs), states, float(self.groups * self.chunk)

    @property
    def saved(self) -> float:
        """The fused kernel stores the outputs of the input product and of the scan, and computes the rest again. The
        output product stores its input."""
        return self.width + self.channels + self.num_heads + 2.0 * self.width

    def core_flops(self, tokens: float) -> float:
        """Per chunk of C tokens: C B^T per group; per head its product with the inputs, the states that a chunk adds,
        and the outputs of the states before it (arXiv 2405.21060, section 6)."""
        group = 2.0 * self.chunk * self.state_size
        head = 2.0 * self.chunk * self.head_dim + 4.0 * self.head_dim * self.state_size
        return self.groups * group + self.num_heads * head

    @property
    def state_bytes(self) -> float:
        """States, by default in 32 bits, and inputs of the convolution in 16 bits."""
        states = float(self.element_bytes or 4) * self.width * self.state_size
        return states + 2.0 * (self.kernel - 1) * self.channels
