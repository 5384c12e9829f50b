"""The linear layers of a model's parts."""

from collections.abc import Iterator
from typing import TypeAlias

from flagcore_models.shapes import attended, latent_widths, own_key_width, widths
from flagcore_training.adapters import Outer

from flagcore.domain.model import Mixer, Model
from flagcore.domain.space import FloatArray

Product: TypeAlias = tuple[FloatArray | float, Outer]


def attention_products(model: Model) -> Iterator[Product]:
    """Yield the inner width and the outputs of the linear layers of attention, the output projection last.

    Those of latent attention are the joint compression, queries, and keys with values.
    """
    h, query = float(model.hidden_size), float(widths(model)[0])
    if model.multi_latent_attention:
        q_rank, kv_rank, rope = latent_widths(model)
        heads = model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))
        yield h, {**({"q_proj": q_rank} if q_rank else {}), "k_proj": kv_rank + rope}
        yield float(q_rank or h), {"q_proj": query}
        yield float(kv_rank), {"v_proj": heads}
    else:
        keys = model.num_query_groups * own_key_width(model)
        gate = model.attention_output_gate * query
        yield h, {"q_proj": query + gate, **({"k_proj": keys / 2.0, "v_proj": keys / 2.0} if keys else {})}
    yield float(attended(model)), {"o_proj": h}


def mixer_products(mixer: Mixer, hidden: int) -> Iterator[Product]:
    """Yield the linear layers of another mixer than attention."""
    for each in mixer.products(hidden):
        yield float(each.inputs), {"out_proj" if each.split == "inputs" else "in_proj": float(each.outputs)}


def network_products(model: Model, width: FloatArray | float, hidden: float) -> Iterator[Product]:
    """Yield the linear layers of a feed-forward network or of an expert with this inner and outer width."""
    yield hidden, {**({"gate_proj": width} if model.gated_linear_unit else {}), "up_proj": width}
    yield width, {"down_proj": hidden}
