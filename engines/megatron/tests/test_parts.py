"""The table of a model's own weights."""

import dataclasses

import numpy as np
import pytest
from flagcore_megatron.adapter import ENGINE
from flagcore_megatron.space.knobs import candidate_columns

from flagcore.domain.model import Model
from tests.product import tasks

LATENT = dataclasses.replace(
    tasks.EXPERTS, **tasks.LATENT, moe_first_dense_layers=1, moe_shared_expert_intermediate_size=64, mtp_num_layers=1
)
TIED = dataclasses.replace(tasks.DENSE, untie_embeddings_and_output_weights=False, qk_layernorm=True)


@pytest.mark.parametrize("model", [tasks.DENSE, tasks.EXPERTS, LATENT, TIED])
def test_parts_add_up_to_the_unsplit_model(model: Model) -> None:
    task = tasks.task(model, devices=1)
    held = ENGINE.components(task, candidate_columns({}), np.zeros(1, dtype=np.int64), tasks.costs(task))
    parts = ENGINE.parts(task)
    assert sum(part.params * part.layers for part in parts) == sum(float(each["params"][0]) for each in held.values())


def test_parts_do_not_depend_on_settings_that_split() -> None:
    settings = {"expert_tensor_parallel_size": 2, "account_for_loss_in_pipeline_split": True}
    assert ENGINE.parts(tasks.task(LATENT, settings=settings)) == ENGINE.parts(tasks.task(LATENT))


def test_parts_are_named_as_papers_name_them() -> None:
    assert " ".join(part.name for part in ENGINE.parts(tasks.task(LATENT))) == "Embedding MLA MoE MLP MTP Output"
    found = {part.name: part.layers for part in ENGINE.parts(tasks.task())}
    assert found == {"Embedding": 1, "Attention": 4, "MLP": 4, "Output": 1}
