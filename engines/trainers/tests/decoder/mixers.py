"""The mixers of the decoder's layers, in plain torch: attention of other forms, gated DeltaNet and Mamba-2.

What a layer stores for its backward pass is what fused kernels store (flash-linear-attention, mamba-ssm, flash
attention): all else is computed again, one head after the other. So memory is that of a job with these kernels, and
times are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

EPSILON = 1e-6


def again(compute: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """Return `compute(*inputs)`, of which only the inputs are stored."""
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)


def narrow_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention, [batch, heads, length, width], whose values are narrower than keys.

    Torch's kernel for CPUs needs equal widths.
    """
    width = value.size(-1)
    padded = functional.pad(value, (0, query.size(-1) - width))
    return functional.scaled_dot_product_attention(query, key, padded, is_causal=True)[..., :width]


def windowed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Return attention, [batch, heads, length, width], of each token to the `window` tokens up to it.

    Blocks of `window` queries attend to their own block and to the one before.
    """
    batch, heads, length, _width = query.shape
    shared = key.size(1) != heads
    if window >= length:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
    blocks = -(-length // window)

    def split(each: torch.Tensor) -> torch.Tensor:
        """Return blocks, [batch, heads, blocks, window, width]."""
        return functional.pad(each, (0, 0, 0, blocks * window - length)).unflatten(2, (blocks, window))

    def flat(each: torch.Tensor) -> torch.Tensor:
        return each.transpose(1, 2).flatten(0, 1)

    query, key, value = split(query), split(key), split(value)
    first = functional.scaled_dot_product_attention(
        query[:, :, 0], key[:, :, 0], value[:, :, 0], is_causal=True, enable_gqa=shared
    )
    pairs = (torch.cat((each[:, :, :-1], each[:, :, 1:]), dim=3) for each in (key, value))
    places = torch.arange(window, device=query.device)[:, None], torch.arange(2 * window, device=query.device)
    mask = (places[1] > places[0]) & (places[1] <= places[0] + window)
    keys, values = map(flat, pairs)
    rest = functional.scaled_dot_product_attention(
        flat(query[:, :, 1:]), keys, values, attn_mask=mask, enable_gqa=shared
    )
    rest = rest.unflatten(0, (batch, blocks - 1)).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, rest), dim=2)[:, :, :length]


def convolved(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return SiLU of a causal convolution of each channel. `inputs`: [batch, length, channels]."""
    padded = functional.pad(inputs.transpose(1, 2), (weight.size(1) - 1, 0))
    return functional.silu(functional.conv1d(padded, weight[:, None], bias, groups=weight.size(0))).transpose(1, 2)


def chunks(inputs: torch.Tensor, size: int) -> torch.Tensor:
    """Return chunks in fp32, [batch, chunks, size, ...], padded with zeros, of [batch, length, ...]."""
    missing = -inputs.size(1) % size
    return functional.pad(inputs.float(), (0, 0) * (inputs.dim() - 2) + (0, missing)).unflatten(1, (-1, size))


def decays(sums: torch.Tensor) -> torch.Tensor:
    """Return the decay between all tokens of chunks, [batch, chunks, size, size]. `sums`: of logarithms of decays."""
    size = sums.size(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=sums.device).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()


def inverse(key: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, size: int) -> torch.Tensor:
    """Return the inverse triangles of the gated delta rule, [batch, chunks, size, size].

    `key`: [batch, length, width] of a head. `decay`: its logarithms, and `rate`: [batch, length]. Source: arXiv
    2412.06464, section 3.3.
    """
    keys, rates = chunks(key, size), chunks(rate, size)
    products = rates[..., None] * (keys @ keys.transpose(-1, -2)) * decays(chunks(decay, size).cumsum(-1))
    ones = torch.eye(size, device=key.device).expand_as(products)
    found = torch.linalg.solve_triangular(ones + products.tril(-1), ones, upper=False, unitriangular=True)
    return found.to(key.dtype)


def scanned(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    size: int,
    rate: torch.Tensor | None = None,
    triangle: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the outputs of a head of linear attention with decays, [batch, length, width of values].

    The state of a token is that of the token before it, times its decay, plus its key times its value. The output is
    its query times the state. With the delta rule, the value is the `rate` times what the state lacks of it, and
    `triangle` is that of `inverse`. Chunks of `size` tokens are computed at once.
    """
    length, narrow = value.size(1), value.dtype
    query, key, value, sums = (chunks(each, size) for each in (query, key, value, decay))
    sums = sums.cumsum(-1)
    inside = (query @ key.transpose(-1, -2)) * decays(sums)
    removed = None
    if rate is not None and triangle is not None:
        rates, whole = chunks(rate, size)[..., None], triangle.float()
        value, removed = whole @ (rates * value), whole @ (rates * sums.exp()[..., None] * key)
    state = value.new_zeros(value.size(0), key.size(-1), value.size(-1))
    outputs = []
    for number in range(value.size(1)):
        added, sum_of_chunk = value[:, number], sums[:, number, :, None]
        if removed is not None:
            added = added - removed[:, number] @ state
        outputs.append(inside[:, number] @ added + (query[:, number] * sum_of_chunk.exp()) @ state)
        last = sum_of_chunk[:, -1:]
        state = last.exp() * state + (key[:, number] * (last - sum_of_chunk).exp()).transpose(-1, -2) @ added
    return torch.cat(outputs, dim=1)[:, :length].to(narrow)


def normed(inputs: torch.Tensor) -> torch.Tensor:
    """Return vectors, in the last dimension, of length 1."""
    return functional.normalize(inputs.float(), dim=-1, eps=EPSILON).to(inputs.dtype)


class GatedDeltaNet(nn.Module):
    """Linear attention with a gated delta rule. `sizes`: those of `flagcore_models.mixers.gated_delta_net`."""

    def __init__(self, hidden_size: int, sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes
        outputs = sizes.channels + sizes.values + 2 * sizes.value_heads
        self.input = nn.Linear(hidden_size, outputs, bias=False)
        self.convolution = nn.Parameter(torch.empty(sizes.channels, sizes.kernel))
        self.log_decay = nn.Parameter(torch.empty(sizes.value_heads))
        self.step = nn.Parameter(torch.empty(sizes.value_heads))
        self.norm = nn.Parameter(torch.empty(sizes.value_dim))
        self.output = nn.Linear(sizes.values, hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor, _angles: torch.Tensor) -> torch.Tensor:
        sizes, heads = self.sizes, self.sizes.value_heads
        inputs, gate, rate, step = self.input(hidden).split((sizes.channels, sizes.values, heads, heads), dim=-1)
        keys = sizes.key_heads * sizes.key_dim
        query, key, value = again(convolved, inputs, self.convolution).split((keys, keys, sizes.values), dim=-1)
        query, key = (again(normed, each.unflatten(-1, (-1, sizes.key_dim))) for each in (query, key))
        decay, rate = again(self._decay, step, self.log_decay, self.step), again(torch.sigmoid, rate.float())
        split = [each.unbind(2) for each in (query, key, value.unflatten(-1, (-1, sizes.value_dim)), decay, rate)]
        outputs, shared = [], heads // sizes.key_heads
        for number in range(heads):
            q, k = (each[number // shared] for each in split[:2])
            v, g, b = (each[number] for each in split[2:])
            triangle = again(inverse, k, g, b, sizes.chunk)
            outputs.append(again(self._scanned, q, k, v, g, b, triangle))
        mixed = torch.stack(outputs, dim=2)
        return self.output(again(self._gated, mixed, gate, self.norm))

    def _scanned(self, q: Any, k: Any, v: Any, g: Any, b: Any, triangle: Any) -> torch.Tensor:
        return scanned(q * self.sizes.key_dim**-0.5, k, v, g, self.sizes.chunk, b, triangle)

    @staticmethod
    def _decay(step: torch.Tensor, log_decay: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return -log_decay.float().exp() * functional.softplus(step.float() + bias.float())

    @staticmethod
    def _gated(mixed: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        output = functional.rms_norm(mixed.float(), weight.shape, weight.float(), EPSILON).flatten(-2)
        return (output * functional.silu(gate.float())).to(gate.dtype)


class Mamba2(nn.Module):
    """A selective state space. `sizes`: those of `flagcore_models.mixers.mamba2`."""

    def __init__(self, hidden_size: int, sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes
        self.input = nn.Linear(hidden_size, sizes.width + sizes.channels + sizes.num_heads, bias=False)
        self.convolution = nn.Parameter(torch.empty(sizes.channels, sizes.kernel))
        self.convolution_bias = nn.Parameter(torch.empty(sizes.channels))
        self.log_decay = nn.Parameter(torch.empty(sizes.num_heads))
        self.step = nn.Parameter(torch.empty(sizes.num_heads))
        self.skip = nn.Parameter(torch.empty(sizes.num_heads))
        self.norm = nn.Parameter(torch.empty(sizes.width))
        self.output = nn.Linear(sizes.width, hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor, _angles: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        gate, inputs, step = self.input(hidden).split((sizes.width, sizes.channels, sizes.num_heads), dim=-1)
        weights = (self.convolution, self.convolution_bias, self.log_decay, self.step, self.skip)
        mixed = again(self._mixed, inputs, step, *weights)
        return self.output(again(self._gated, mixed, gate, self.norm))

    def _mixed(
        self,
        inputs: torch.Tensor,
        step: torch.Tensor,
        weight: Any,
        bias: Any,
        log_decay: Any,
        step_bias: Any,
        skip: Any,
    ) -> torch.Tensor:
        sizes, states = self.sizes, self.sizes.groups * self.sizes.state_size
        value, key, query = convolved(inputs, weight, bias).split((sizes.width, states, states), dim=-1)
        values = value.unflatten(-1, (-1, sizes.head_dim)).unbind(2)
        keys, queries = (each.unflatten(-1, (-1, sizes.state_size)).unbind(2) for each in (key, query))
        steps = functional.softplus(step.float() + step_bias.float()).unbind(2)
        decay, shared, outputs = -log_decay.float().exp(), sizes.num_heads // sizes.groups, []
        for number, each in enumerate(values):
            group = number // shared
            sized = (queries[group], keys[group], each, steps[number], decay[number], skip[number])
            outputs.append(again(self._scanned, *sized))
        return torch.stack(outputs, dim=2)

    def _scanned(self, query: Any, key: Any, value: Any, step: Any, decay: Any, skip: Any) -> torch.Tensor:
        found = scanned(query, key, (value * step[..., None]).to(value.dtype), step * decay, self.sizes.chunk)
        return found + skip * value

    def _gated(self, mixed: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        output = (mixed.flatten(-2).float() * functional.silu(gate.float())).unflatten(-1, (self.sizes.groups, -1))
        output = functional.rms_norm(output, output.shape[-1:], None, EPSILON).flatten(-2)
        return (output * weight.float()).to(gate.dtype)


MIXERS = {"Gated DeltaNet": GatedDeltaNet, "Mamba-2": Mamba2}
"""The modules of mixers, by their label."""
