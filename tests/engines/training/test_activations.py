"""What single modules keep for the backward pass, exact where it is arithmetic."""

from __future__ import annotations

import pytest

from flagcore.engines.training.memory.activations import norm, stored_scores
from flagcore.engines.training.memory.modules import Sizes
from tests.engines.training.candidates import LLAMA, layout, train

TOKENS = 4096


@pytest.mark.parametrize("tensor", [1, 4])
def test_fused_attention_stores_a_number_per_row_and_unfused_attention_the_probabilities(tensor: int) -> None:
    rows, split = TOKENS * LLAMA.num_attention_heads / tensor, layout(tensor=tensor)
    assert stored_scores(train(), split)[0] == 4 * rows
    assert stored_scores(train(flash=False), split)[0] == 2 * rows * TOKENS


def test_a_norm_keeps_its_input_and_one_fp32_number_per_token() -> None:
    module = norm("attn_norm", Sizes.from_layout(train(), layout()))
    assert module.stored[0] == TOKENS * (2 * LLAMA.hidden_size + 4)
