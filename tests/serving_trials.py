"""A small serving task, and trials of it as a run keeps them."""

from flagcore.domain.space import Candidate
from flagcore.domain.spec import figure_name, seconds
from flagcore.domain.trial import Measurement, Role, Trial, TrialState

OBJECTIVE = "output_tokens_per_s"
LIMITS = {"ttft_s.p99": 1.0}


def trial(
    number: int,
    rate: float,
    ttft: float = 0.5,
    *,
    role: Role = Role.SEARCH,
    slots: int | None = None,
    limits: dict[str, float] = LIMITS,
    objective: str = OBJECTIVE,
) -> Trial:
    """A trial of `slots` (default: its number) that wrote `rate` tokens per second at a p99 of `ttft` seconds."""
    figures = {"output_tokens_per_s": rate, "output_tokens_per_s_per_device": rate / 8}
    figures |= {"ttft_s.p50": ttft / 2, "ttft_s.p99": ttft, "tpot_s.p50": 1.0 / rate}
    step = seconds(objective, figures[figure_name(objective)])
    broken = tuple(
        f"{name} is {figures[name]:g} s, over {maximum:g} s" for name, maximum in limits.items() if ttft > maximum
    )
    return Trial(
        number=number,
        candidate=Candidate.of({"parallel": number if slots is None else slots}),
        role=role,
        state=TrialState.MEASURED,
        measurement=Measurement(
            step_times_s=(step,),
            step_time_s=step,
            spread_s=0.0,
            tokens_per_second_per_device=2 * rate,
            figures=figures,
            points=({"concurrency": 8, **figures},),
            broken=broken,
        ),
    )
