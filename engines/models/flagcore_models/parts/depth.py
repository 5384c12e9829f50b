"""A depth of multi-token prediction (DeepSeek-V3, arXiv 2412.19437)."""

from dataclasses import dataclass

from flagcore.domain.model import Layer, Part, Product


@dataclass(frozen=True, kw_only=True)
class Depth(Part):
    """A layer after the product of the last output and of the next embedding, each with a norm of `width` elements.

    Its output has a norm, and it uses the embedding and the head of the model. `count`: the depths of the model.
    `shared`: whether all have the weights of one. `saved`: elements per token beside those of the layer: the inputs of
    two norms, their joined outputs, which have twice the width, the output before its norm, and a copy of it after its
    norm, for the head (megatron-core 0.16 `MultiTokenPredictionLayer`).
    """

    layer: Layer
    width: int
    count: int
    shared: bool = False

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return (Product(inputs=2 * hidden_size, outputs=hidden_size, adapts=False, component="mtp", group=""),)

    @property
    def norms(self) -> tuple[int, ...]:
        return (self.width,) * 3

    @property
    def own(self) -> float:
        """The share of depths that have weights of their own."""
        return 1.0 / self.count if self.shared else 1.0

    @property
    def saved(self) -> float:
        return 6.0 * self.width
