"""The mixers of the decoder: chunks and blocks compute what a loop over tokens does, also in backward."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flagcore_models.mixers.gated_delta_net import GatedDeltaNet  # noqa: E402
from flagcore_models.mixers.mamba2 import Mamba2  # noqa: E402
from torch.nn import functional  # noqa: E402

from engines.trainers.tests.decoder import mixers  # noqa: E402

DELTA = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
STATES = Mamba2(num_heads=4, head_dim=6, state_size=8, groups=2)
HIDDEN, LENGTH = 16, 150


def _state_by_state(query: Any, key: Any, value: Any, decay: Any, rate: Any = None) -> Any:
    """Return the outputs of linear attention of heads, [batch, length, heads, width], one token after the other."""
    state, outputs = query.new_zeros(*key.shape[:1], *key.shape[2:], value.size(-1)), []
    for token in range(query.size(1)):
        k, added = key[:, token], value[:, token]
        state = decay[:, token, :, None, None].exp() * state
        if rate is not None:
            added = rate[:, token, :, None] * (added - (k[..., None, :] @ state)[..., 0, :])
        state = state + k[..., None] * added[..., None, :]
        outputs.append((query[:, token, :, None] @ state)[..., 0, :])
    return torch.stack(outputs, 1)


def _delta(layer: Any, hidden: Any) -> Any:
    s = layer.sizes
    inputs, gate, rate, step = layer.input(hidden).split((s.channels, s.values, 4, 4), dim=-1)
    query, key, value = mixers.convolved(inputs, layer.convolution).split((16, 16, 24), dim=-1)
    query, key = (
        functional.normalize(each.unflatten(-1, (2, 8)), dim=-1).repeat_interleave(2, 2) for each in (query, key)
    )
    decay = -layer.log_decay.exp() * functional.softplus(step + layer.step)
    mixed = _state_by_state(query * 8**-0.5, key, value.unflatten(-1, (4, 6)), decay, rate.sigmoid())
    normed = functional.rms_norm(mixed, (6,), layer.norm, mixers.EPSILON).flatten(2)
    return layer.output(normed * functional.silu(gate))


def _states(layer: Any, hidden: Any) -> Any:
    gate, inputs, step = layer.input(hidden).split((24, 56, 4), dim=-1)
    inputs = mixers.convolved(inputs, layer.convolution, layer.convolution_bias)
    value, key, query = (
        each.unflatten(-1, (count, -1)) for each, count in zip(inputs.split((24, 16, 16), -1), (4, 2, 2), strict=True)
    )
    key, query = (each.repeat_interleave(2, 2) for each in (key, query))
    step = functional.softplus(step + layer.step)
    mixed = _state_by_state(query, key, value * step[..., None], -layer.log_decay.exp() * step)
    mixed = (mixed + layer.skip[:, None] * value).flatten(2) * functional.silu(gate)
    normed = functional.rms_norm(mixed.unflatten(-1, (2, 12)), (12,), None, mixers.EPSILON).flatten(2)
    return layer.output(normed * layer.norm)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "sizes", "expected"), [(mixers.GatedDeltaNet, DELTA, _delta), (mixers.Mamba2, STATES, _states)]
)
def test_chunks_are_a_loop_over_tokens(kind: Any, sizes: Any, expected: Any) -> None:
    torch.manual_seed(1)
    layer = kind(HIDDEN, sizes)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    hidden = torch.randn(2, LENGTH, HIDDEN, requires_grad=True)
    tensors = [hidden, *layer.parameters()]
    assert sum(each.numel() for each in layer.parameters()) == sizes.other_weights + sum(
        each.inputs * each.outputs for each in sizes.products(HIDDEN)
    )
    found, wanted = layer(hidden, None), expected(layer, hidden)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad((each * weights).sum(), tensors) for each in (found, wanted))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("window", [16, 50, 200])
def test_blocks_attend_to_a_window(window: int) -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, heads, LENGTH, 8) for heads in (4, 2, 2))
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = (distance >= 0) & (distance < window)
    wanted = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(mixers.windowed_attention(query, key, value, window), wanted)
