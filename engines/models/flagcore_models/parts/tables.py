"""The embedding, embeddings that each layer has of its own, and the final norm with the output head and the loss."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from flagcore.domain.model import Part, Product


@dataclass(frozen=True, kw_only=True)
class LayerEmbeddings(Part):
    """A row of `width` elements for each token of the `vocabulary` and each of the `layers`.

    Products: the table and the projection of the embedding, of all layers together (`embed_tokens_per_layer`,
    `per_layer_model_projection`), and a gate and a projection in each layer (`per_layer_input_gate`,
    `per_layer_projection`). `saved`: elements per token until the end of backward, before a norm and after it
    (`project_per_layer_inputs`). `saved_by_layer`: tensors of the residual stream, and other elements per token: the
    inputs of two products and of a norm, and a product of their width.
    """

    vocabulary: int
    layers: int
    width: int

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        part, width = partial(Product, adapts=False, component="embedding", group=""), self.layers * self.width
        return (
            part(inputs=self.vocabulary, outputs=width),
            part(inputs=hidden_size, outputs=width),
            part(inputs=hidden_size, outputs=self.width, copies=self.layers),
            part(inputs=self.width, outputs=hidden_size, split="inputs", copies=self.layers),
        )

    @property
    def saved(self) -> float:
        return 2.0 * self.layers * self.width

    @property
    def saved_by_layer(self) -> tuple[float, float]:
        return 2.0, 3.0 * self.width


_table = partial(Product, adapts=False, group="")


@dataclass(frozen=True, kw_only=True)
class Embedding(Part):
    """A row of the hidden size for each token of the `vocabulary`. It saves the token ids.

    A pass moves a row `passes` times: it is read and written, and its gradient is added to the table. `launches`: of a
    pass (an estimate).
    """

    passes: ClassVar[tuple[float, float]] = (2.0, 3.0)
    launches: ClassVar[float] = 6.0

    vocabulary: int

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return (_table(inputs=self.vocabulary, outputs=hidden_size, split="inputs", component="embedding"),)


@dataclass(frozen=True, kw_only=True)
class Head(Part):
    """The final norm of `width` elements, the product with the vocabulary, and the loss.

    `logits`: the elements of its output per token, one for each entry of the vocabulary, without padding. `tied`:
    whether its table is that of the embedding. The loss moves 8 elements of 16 bits per logit forward and 4
    backward: logits are written in 16 and 32 bits, read for the maximum and the sum, and converted to their gradient
    (megatron-core 0.16 `cross_entropy.py`). A soft cap divides, caps and multiplies logits first: `capped` elements in
    addition. Autograd keeps its result of `cap_bytes` in 16 bits (0: no cap). `launches`: of a pass (an estimate).
    """

    passes: ClassVar[tuple[float, float]] = (8.0, 4.0)
    capped: ClassVar[tuple[float, float]] = (6.0, 7.0)
    launches: ClassVar[float] = 20.0

    logits: int
    width: int
    tied: bool = False
    cap_bytes: int = 0

    def kept(self, value_bytes: float) -> float:
        """Return the bytes of each logit that a soft cap keeps until the backward pass, in tensors of `value_bytes`."""
        return max(self.cap_bytes, value_bytes) if self.cap_bytes else 0.0

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return (_table(inputs=hidden_size, outputs=self.logits, component="output_head"),)

    @property
    def norms(self) -> tuple[int, ...]:
        return (self.width,)
