"""What every serving engine refuses: more devices than there are, and models that cannot be split so."""

from __future__ import annotations

from flagcore.domain.space import BoolArray, Columns, IntArray, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import heterogeneous
from flagcore.engines.serving.common.names import DP, EP, INSTANCES, PP, TP
from flagcore.engines.serving.common.place import Place, longest


def devices(columns: Columns) -> IntArray:
    """Return the devices of one instance."""
    return columns[TP] * columns[PP] * columns[DP] if DP in columns else columns[TP] * columns[PP]


def split_rules(task: Task, *, data: bool) -> tuple[Rule, ...]:
    """Return the rules of instances and of splitting a model.

    `data` says that the engine has attention DP and EP, and that it splits attention by heads.
    """
    place, model = Place.of(task), task.spec.model
    knobs = (INSTANCES, TP, PP, DP) if data else (INSTANCES, TP, PP)
    product = " x ".join(knobs)
    rules = (
        Rule(
            name="cards",
            knobs=knobs,
            message=f"{product} must not exceed the {place.cards} devices",
            broken=lambda c: c[INSTANCES] * devices(c) > place.cards,
        ),
        Rule(
            name="pipeline_layers",
            knobs=(PP,),
            message=f"{PP} must not exceed num_layers = {model.num_layers}",
            broken=lambda c: c[PP] > model.num_layers,
        ),
        *heterogeneous.rules(task, heads=data),
    )
    return (*rules, *_heads(task), *_experts(task)) if data else rules


def _heads(task: Task) -> tuple[Rule, ...]:
    model = task.spec.model
    heads, groups, latent = model.num_attention_heads, model.num_query_groups, model.multi_latent_attention
    return (
        Rule(
            name="attention_heads",
            knobs=(TP,),
            message=f"{TP} must divide num_attention_heads = {heads}",
            broken=lambda c: (c[TP] > 0) & (heads % _positive(c[TP]) != 0),
        ),
        Rule(
            name="query_groups",
            knobs=(TP,),
            message=f"num_query_groups = {groups} must be a multiple or a divisor of {TP}",
            broken=lambda c: (groups % _positive(c[TP]) != 0) & (c[TP] % groups != 0) & (not latent),
        ),
    )


def _experts(task: Task) -> tuple[Rule, ...]:
    experts = task.spec.model.num_moe_experts
    return (
        Rule(
            name="experts_exist",
            knobs=(EP,),
            message=f"{EP} > 1 needs a model with experts",
            broken=lambda c: (c[EP] > 1) & (experts is None),
        ),
    )


def context_rule(task: Task, knob: str) -> Rule:
    """Return that a sequence has room for the longest request; an engine would cut its answer, and say nothing."""
    need = longest(task.spec.serve.loads)
    return Rule(
        name="context_length",
        knobs=(knob,),
        message=f"{knob} must hold the longest request, prompt and answer: {need} tokens",
        broken=lambda c: (c[knob] > 0) & (c[knob] < need),
    )


def same_as_unset(knob: str, code: int, why: str) -> Merge:
    """Return that a knob set to what the engine does by itself is not set."""

    def canonical(columns: Columns) -> dict[str, IntArray]:
        return {knob: columns[knob] * (columns[knob] != code)}

    return Merge(name=f"{knob}_{why}", knobs=(knob,), canonical=canonical)


def _positive(number: IntArray) -> IntArray:
    return number.clip(1)


def both_set(left: IntArray, right: IntArray) -> BoolArray:
    """Return where two knobs, whose neutral value has code 0, are set."""
    both: BoolArray = (left > 0) & (right > 0)
    return both
