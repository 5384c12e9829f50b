"""Every public name on every engine gets an answer or one line that says why not, and has equal weights everywhere."""

import random
from datetime import date

import pytest
from flagcore_models.public import public_models

from tests.product.models.matrix import SIZES, SPACES, cell, cells, problems

NAMES = sorted(public_models())
SEED = date.today().toordinal()
"""The seed of the drawn names, which changes every day. The test of all names has each of them as a parameter."""
DRAWN = sorted(random.Random(SEED).sample(NAMES, len(NAMES) // 10))


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_names_have_an_answer_or_one_line_on_every_engine(name: str) -> None:
    draw = random.Random(f"{SEED} {name}")
    sizes = [(engine, draw.choice(SIZES), draw.random() < 0.5) for engine in SPACES]
    found = [cell(name, engine, size, whole=False, weighed=weighed) for engine, size, weighed in sizes]
    assert not [line for each in found for line in problems(each)], f"seed {SEED}"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_an_answer_or_one_line_on_every_engine(name: str) -> None:
    assert not [line for each in cells([name]) for line in problems(each)]
