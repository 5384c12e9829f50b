"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are compressed together."""

from dataclasses import dataclass
from functools import partial

from flagcore.domain.model import Output, Product
from flagcore.domain.space import FloatArray
from flagcore_models.mixers.attention import Attention

EXPANSION = "expansion"
"""The name of the product that expands latents to keys and values."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Queries are projected over `query_rank` elements (0: at once), keys and values over `latent_rank`.

    `nope_dim`, `rope_dim`: the parts of a query or key head without and with the position, which are `head_dim`. All
    heads share the part of the key with the position. `qk_norm`: whether the compressed tensors have norms.
    """

    label = "MLA"

    latent_rank: int
    query_rank: int = 0
    nope_dim: int
    rope_dim: int

    @property
    def packed_bytes(self) -> tuple[float, float]:
        """Bytes per cached element of the layouts of sparse kernels: FP8 with an fp32 scale per 128 and the rotary part
        in 16 bits, and NVFP4 with that part in FP8. 656 and 352 bytes a token (vLLM 0.32 `flashmla_sparse.py`)."""
        latent, rope = self.latent_rank, self.rope_dim
        sizes = latent * (1.0 + 4.0 / 128.0) + 2.0 * rope, latent * 9.0 / 16.0 + rope
        return sizes[0] / (latent + rope), sizes[1] / (latent + rope)

    @property
    def key_width(self) -> int:
        return self.query_width

    @property
    def value_width(self) -> int:
        return self.attended

    @property
    def rotated(self) -> int:
        return (self.num_heads + 1) * self.rope_dim

    @property
    def expanded(self) -> int:
        """The total width of keys without their rotary part and of values, to which latents expand."""
        return self.num_heads * (self.nope_dim + self.value_dim)

    @property
    def norms(self) -> tuple[int, ...]:
        return (self.query_rank, self.latent_rank) if self.qk_norm else ()

    def inputs(self, hidden_size: int) -> tuple[Product, ...]:
        rank = self.query_rank
        queries = Output("q_proj", self.query_width + self.gate * self.attended)
        low = ((Output("q_proj", rank),) if rank else ()) + (Output("k_proj", self.latent_rank + self.rope_dim),)
        part = partial(Product, component="qkv_proj")
        return (
            part(
                inputs=hidden_size,
                outputs=rank + self.latent_rank + self.rope_dim,
                split="",
                name="compression",
                joined=low,
            ),
            part(inputs=rank or hidden_size, outputs=queries.width, name="queries", joined=(queries,)),
            part(
                inputs=self.latent_rank,
                outputs=self.expanded,
                name=EXPANSION,
                joined=(Output("v_proj", self.expanded),),
            ),
            *self._index(hidden_size, rank or hidden_size),
        )

    @property
    def cached_heads(self) -> int:
        return 1

    def cached_on(self, ranks: FloatArray | float) -> FloatArray | float:
        """The compressed key with the value, and the rotary part of the key, which each rank has whole."""
        return float(self.latent_rank + self.rope_dim) + 0.0 * ranks
