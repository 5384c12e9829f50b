"""The vision tower of a model: layers over the patches of images, and mergers (Qwen2.5-VL, arXiv 2502.13923)."""

from dataclasses import dataclass

from flagcore.domain.model import Layer, Part, Product, Vision
from flagcore.domain.space import FloatArray
from flagcore_models.mixers.attention import Attention
from flagcore_models.networks.dense import Dense


@dataclass(frozen=True, kw_only=True)
class VisionTower(Part):
    """The tower that `vision` describes: an embedding of patches, a `layer` several times, and mergers (`merging`) of
    two products, each of which makes a token of `merge_size` x `merge_size` patches. Biases and norms do not count."""

    vision: Vision

    @property
    def layer(self) -> Layer:
        sizes, size = self.vision, self.vision.hidden_size // self.vision.num_heads
        attention = Attention(num_heads=sizes.num_heads, groups=sizes.num_heads, head_dim=size, value_dim=size)
        return Layer(mixer=attention, network=Dense(width=sizes.ffn_hidden_size, gated=sizes.gated_linear_unit))

    @property
    def layer_products(self) -> tuple[Product, ...]:
        return tuple(each for part in self.layer.parts for each in part.products(self.vision.hidden_size))

    @property
    def merging(self) -> tuple[Product, Product]:
        merged, copies = self.vision.hidden_size * self.vision.merge_size**2, self.vision.mergers
        first = Product(inputs=merged, outputs=merged, copies=copies)
        return first, Product(inputs=merged, outputs=self.vision.output_size, split="inputs", copies=copies)

    @property
    def merger_weights(self) -> float:
        """The number of weights in all mergers."""
        return float(sum(each.weights for each in self.merging))

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        patches = Product(inputs=self.vision.channels * self.vision.patch_size**2, outputs=self.vision.hidden_size)
        return patches, *self.layer_products * self.vision.num_layers, *self.merging

    @property
    def weights(self) -> float:
        """The number of weights in the tower."""
        return float(sum(each.weights for each in self.products(self.vision.output_size)))

    def saved_by_mergers(self, ranks: FloatArray) -> FloatArray:
        """Return the elements per patch of the inputs of all mergers, and before and after the activation function, on
        one of `ranks` ranks that divide these."""
        return self.vision.mergers * self.vision.hidden_size * (1.0 + 2.0 / ranks)
