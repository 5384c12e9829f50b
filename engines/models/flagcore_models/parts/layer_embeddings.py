"""Embeddings that each layer has of its own (Gemma 3n: transformers 5.24 `models/gemma3n`)."""

from dataclasses import dataclass
from functools import partial

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
