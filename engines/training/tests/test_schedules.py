"""Pipeline schedules: closed forms against steps that are played pass by pass, and against published step times."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_training.critical_path import StageTimes
from flagcore_training.schedules import SCHEDULES, deferred, in_flight, makespan

from engines.training.tests.simulation import Pass, orders_of, step_seconds
from flagcore.domain.prediction import Passes
from flagcore.domain.space import FloatArray

FOLDED_SCHEDULES = [name for name, schedule in SCHEDULES.items() if schedule.folded]
WHOLE = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
LENGTHS = (1, 2, 3, 4, 6, 8)
KINDS = ("even", "edges", "hetero")
"""Even stages; a first and a last stage that differ (embedding, head and loss); every stage on another chip."""

PUBLISHED = json.loads(Path(__file__).with_name("published_orders.json").read_text("utf-8"))
"""Results of orders of passes that other schedulers publish or plan: ZB-1p, ZB-2p and ZB-V (arXiv 2401.10241), V-Half
and V-Min (arXiv 2405.15362), DualPipe and DualPipeV (their repository). `steps`: schedule, kind, least, lengths, and
the seconds of a step for each of `cases`. `held`: by schedule and number of stages, `held_of` for each stage."""

Seconds = dict[str, list[float]]
Case = tuple[int, Seconds]


def cases(kind: str, seed: int, count: int, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Case]:
    """Yield the length of a pipeline and its seconds, a whole stage each."""
    draw = random.Random(seed)
    for _ in range(count):
        p, back, weight = draw.choice(lengths), draw.uniform(0.8, 1.3), draw.uniform(0.4, 1.1)
        speed = [1.0] * p
        if kind == "edges":
            speed[0], speed[-1] = draw.uniform(0.8, 1.1), draw.uniform(0.8, 1.4)
        elif kind == "hetero":
            speed = [draw.uniform(0.7, 1.4) for _ in range(p)]
        yield p, {"F": speed, "B": [back * x for x in speed], "W": [weight * x for x in speed]}


def stage_times(seconds: Seconds, send: float = 0.0, **options: float) -> StageTimes:
    forward, back, weight = (np.array(seconds[kind])[:, None] for kind in "FBW")
    return StageTimes(forward=forward, backward_input=back, backward_weight=weight, send=np.array([send]), **options)


def closed(schedule: str, times: StageTimes, m: float, v: float = 1.0) -> float:
    return float(makespan(schedule, times, np.array([float(m)]), np.array([float(v)]))[0])


def passes_of(schedule: str, seconds: Seconds, *, m: int = 1, v: int = 1, **extra: Any) -> Passes:
    """Return the passes of whole stages; receivers wait for messages by default."""
    arguments: dict[str, Any] = {"send_s": 0.0, "sender_waits": False, "weight_share": 0.4, **extra}
    return Passes(
        schedule=schedule,
        microbatches=m,
        virtual=v,
        forward_s=tuple(seconds["F"]),
        backward_s=tuple(b + w for b, w in zip(seconds["B"], seconds["W"], strict=True)),
        weight_s=tuple(seconds["W"]),
        **arguments,
    )


def simulated_seconds(schedule: str, m: int, seconds: Seconds, send: float = 0.0, **extra: Any) -> float:
    return step_seconds(passes_of(schedule, seconds, m=m, send_s=send, **extra))


@pytest.mark.parametrize("kind", KINDS)
def test_1f1b_and_gpipe_are_exact_for_any_stages_and_micro_batches(kind: str) -> None:
    for k, (p, seconds) in enumerate(cases(kind, seed=1, count=150)):
        m = 1 + k % (3 * p)
        for schedule in ("1f1b", "gpipe"):
            simulated = simulated_seconds(schedule, m, seconds)
            assert closed(schedule, stage_times(seconds), m) == pytest.approx(simulated, rel=1e-9)


def test_a_send_that_blocks_its_sender_is_work_of_the_sender() -> None:
    for k, (p, seconds) in enumerate(cases("edges", seed=4, count=60)):
        m, send = p + k % (2 * p), 0.07
        simulated = simulated_seconds("1f1b", m, seconds, send, sender_waits=True)
        assert closed("1f1b", stage_times(seconds, send, blocking=1.0), m) == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize(("kind", "within"), [("even", 1e-9), ("edges", 0.03), ("hetero", 0.03)])
@pytest.mark.parametrize("send", [0.0, 0.03])
def test_interleaved_agrees_with_megatrons_order(kind: str, within: float, send: float) -> None:
    for k, (p, seconds) in enumerate(cases(kind, seed=5, count=60, lengths=LENGTHS[1:])):
        m, v = p * (1 + k % 5), 2 + k % 3
        simulated = simulated_seconds("interleaved", m, seconds, send, v=v)
        assert closed("interleaved", stage_times(seconds, send), m, v) == pytest.approx(simulated, rel=within)


def test_interleaved_without_virtual_stages_is_1f1b() -> None:
    for p, seconds in cases("hetero", seed=6, count=20):
        times = stage_times(seconds, 0.02)
        assert closed("interleaved", times, 3 * p, 1) == pytest.approx(closed("1f1b", times, 3 * p))


def deviations(schedule: str, kind: str, least: int, lengths: tuple[int, ...] = (2, 3, 4, 6, 8)) -> FloatArray:
    """Return closed form over simulation, less 1, from `least` p micro-batches on."""
    found, row = [], [schedule, kind, least, list(lengths)]
    published = next((each[4] for each in PUBLISHED["steps"] if each[:4] == row), None)
    for k, (p, seconds) in enumerate(cases(kind, seed=7, count=30, lengths=lengths)):
        m, send, share = p * (least + k // 3 % 3), (0.0, 0.02, 0.05)[k % 3], (0.4, 0.7, 1.0)[k % 3]
        simulated = published[k] if published else simulated_seconds(schedule, m, seconds, send)
        found.append(closed(schedule, stage_times(seconds, send, weight_share=share), m) / simulated - 1.0)
    return np.abs(found)


def bounds(schedule: str, kind: str, worst: float, mean: float) -> Any:
    """Two micro-batches per stage at the least; stages that all differ cover what those with other edges do."""
    return pytest.param(schedule, kind, 2, worst, mean, marks=pytest.mark.long if kind == "edges" else ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "kind", "least", "worst", "mean"),
    [
        *[bounds(name, kind, 0.01, 0.001) for name in ("zb-h1", "zb-h2") for kind in KINDS],
        *[bounds("zb-1p", kind, 0.025, 0.002) for kind in KINDS],
        *[(name, "even", 1, 0.01, 0.001) for name in ("zb-h1", "zb-1p")],
        ("zb-2p", "even", 1, 0.03, 0.005),
        ("zb-2p", "edges", 2, 0.075, 0.01),
        ("zb-2p", "hetero", 2, 0.09, 0.01),
        *[bounds("zb-v", kind, 0.03, 0.01) for kind in KINDS],
        *[bounds("v-half", kind, 0.04, 0.015) for kind in KINDS],
        ("v-min", "even", 2, 0.05, 0.02),
        bounds("v-min", "edges", 0.08, 0.03),
        ("v-min", "hetero", 2, 0.12, 0.04),
        *[bounds(name, kind, 0.045, 0.02) for name in ("dualpipe", "dualpipev") for kind in KINDS],
    ],
)
def test_zero_bubble_and_folded_schedules_agree_with_their_orders(
    schedule: str, kind: str, least: int, worst: float, mean: float
) -> None:
    """Automatic schedules against a plan of our own under the same memory; V patterns of two devices stand apart."""
    lengths = (2, 4, 6, 8) if schedule == "dualpipe" else (2, 3, 4, 6, 8)
    lengths = (3, 4, 5, 6, 7, 8) if schedule in ("v-half", "v-min") else lengths
    found = deviations(schedule, kind, least, lengths)
    assert found.max() < worst
    assert found.mean() < mean


@pytest.mark.parametrize("schedule", ["v-half", "v-min"])
def test_v_patterns_of_two_devices_are_further_from_their_formula(schedule: str) -> None:
    assert max(deviations(schedule, kind, 2, (2,)).max() for kind in KINDS) < 0.12


def test_pairs_that_run_together_shorten_dualpipe() -> None:
    for p, m, published in ((2, 6, (17.1, 17.9)), (4, 12, (35.8, 36.6)), (8, 16, (51.6, 52.4))):
        times = stage_times({"F": [1.0] * p, "B": [1.1] * p, "W": [0.9] * p}, paired=np.full((p, 1), 2.7))
        found = [closed(schedule, times, m) for schedule in ("dualpipe", "dualpipev")]
        assert found == pytest.approx(published, rel=0.03)


def columns(seed: int, p: int, count: int = 400) -> StageTimes:
    draw = np.random.default_rng(seed)
    speed = draw.uniform(0.7, 1.4, (p, count))
    back, weight = draw.uniform(0.8, 1.4, count), draw.uniform(0.4, 1.1, count)
    return StageTimes(
        forward=speed,
        backward_input=back * speed,
        backward_weight=weight * speed,
        send=draw.choice([0.0, 0.05], count),
        blocking=draw.choice([0.0, 1.0], count),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_takes_no_less_than_its_work_or_one_pass_and_no_less_for_more_micro_batches(schedule: str) -> None:
    for p in (2, 4, 6, 8):
        times = columns(p, p)
        v, one_pass = np.full(400, 2.0), times.busy.sum(axis=0) - times.backward_weight[1:].sum(axis=0)
        busy = (times.busy + times.busy[::-1]) / 2.0 if schedule == "dualpipe" else times.busy
        before = np.zeros(400)
        for m in range(p, 6 * p + 1, p):
            found = makespan(schedule, times, np.full(400, float(m)), v)
            assert (found >= m * busy.max(axis=0) * (1.0 - 1e-12)).all()
            assert SCHEDULES[schedule].post_validation or (found >= one_pass * (1.0 - 1e-12)).all()
            assert (found >= before * (1.0 - 1e-12)).all()
            before = found


def test_a_step_takes_at_least_the_messages_of_one_round_trip() -> None:
    seconds = {kind: [1.0] * 4 for kind in "FBW"}
    assert closed("dualpipe", stage_times(seconds, send=50.0), 2) == pytest.approx(4 * (1 + 1) + 1 + 2 * 3 * 50.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_takes_the_sum_of_its_passes(schedule: str) -> None:
    times = columns(0, 1)
    assert makespan(schedule, times, np.full(400, 5.0), np.ones(400)) == pytest.approx(5.0 * times.busy[0])


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_more_memory_and_deferred_weights_never_make_a_plan_slower(p: int) -> None:
    times = columns(20 + p, p)
    for m in range(1, 5 * p):
        number = np.full(400, float(m))
        two, one, plain = (makespan(name, times, number, np.ones(400)) for name in ("zb-2p", "zb-1p", "1f1b"))
        assert (two <= one).all()
        assert (one <= plain * (1.0 + 1e-12)).all()


def test_columns_and_rows_give_equal_results() -> None:
    times, m, v = columns(3, 4, 6), np.array([4.0, 8.0, 12.0, 16.0, 20.0, 24.0]), np.array([1.0, 2, 3, 1, 2, 3])
    for schedule in SCHEDULES:
        all_rows = makespan(schedule, times, m, v)
        for k in range(6):
            row = StageTimes(
                forward=times.forward[:, [k]],
                backward_input=times.backward_input[:, [k]],
                backward_weight=times.backward_weight[:, [k]],
                send=times.send[[k]],
                blocking=np.asarray(times.blocking)[[k]],
            )
            assert makespan(schedule, row, m[[k]], v[[k]])[0] == pytest.approx(all_rows[k], rel=1e-12)


PAPER = """
8  24  3  18522 18086  9337 601   1.5254 1.3740 1.3953 1.2414
8  32  3  18513 18086  9331 626   1.9200 1.7910 1.7910 1.6216
8  64  3  18546 18097  9321 762   3.5294 3.4532 3.3803 3.2215
8  24  4  29718 29444 19927 527   2.5714 2.2444 2.3196 2.0833
8  32  4  29802 29428 19530 577   3.2432 2.9412 3.0000 2.7586
8  64  4  29935 29621 19388 535   5.9553 5.7279 5.7143 5.4670
16 48  3  11347 11248  8132 377   2.1429 1.9481 1.8634 1.6575
16 64  3  11307 11254  8101 379   2.6846 2.5157 2.3952 2.1858
16 128 3  11325 11308  8109 378   4.8780 4.8193 4.5455 4.3243
32 96  2  10419 10207  7715 408   3.9474 3.6585 3.4483 3.0303
32 128 2  10408 10204  7703 408   5.0000 4.7059 4.4444 4.0000
32 256 2  10402 10248  7698 460   9.0909 8.8889 8.3333 8.0000
"""
"""arXiv 2401.10241, four models on A100s: stages, micro-batches, virtual stages of its interleaved runs; profiled
microseconds of F, B, W and one send (as in the authors' public scheduler); measured seconds of a step with 1F1B,
interleaved, ZB-1p and ZB-2p (from throughput with three digits)."""


def test_published_steps_of_four_schedules_agree_with_one_scale_per_model() -> None:
    """Sends block in Megatron's own schedules of these runs, and overlap in theirs, which skip the barrier."""
    shares = {8: 0.366, 16: 0.432, 32: 0.432}  # 32 h / (34 h + 5 a s)
    rows = np.array([line.split() for line in PAPER.strip().splitlines()], dtype=np.float64)
    found = np.empty((12, 4))
    for k, (p, m, v, *micro, _, _, _, _) in enumerate(rows):
        f, b, w, send = (value * 1e-6 for value in micro)
        seconds = {"F": [f] * int(p), "B": [b] * int(p), "W": [w] * int(p)}
        for c, schedule in enumerate(("1f1b", "interleaved", "zb-1p", "zb-2p")):
            split = SCHEDULES[schedule].splits_backward
            times = stage_times(seconds, send, blocking=0.0 if split else 1.0, weight_share=shares[int(p)])
            found[k, c] = closed(schedule, times, m, v)
    ratio = np.log(rows[:, 7:] / found).reshape(4, 12)
    deviation = np.abs(np.expm1(ratio - ratio.mean(axis=1, keepdims=True)))
    assert deviation.max() < 0.04
    assert deviation.mean() < 0.015


def arrays(*values: float) -> tuple[FloatArray, ...]:
    return tuple(np.array([float(value)]) for value in values)


def held_by_order(schedule: str, p: int, m: int, v: int = 1) -> list[tuple[float, float]]:
    """Return the result of `held_of` for each stage."""
    if published := PUBLISHED["held"].get(schedule):
        return [tuple(each) for each in published[str(p)]]
    passes = passes_of(schedule, {kind: [1.0] * p for kind in "FBW"}, m=m, v=v)
    return [held_of(order, v) for order in orders_of(passes)]


def held_of(order: list[Pass], parts: int) -> tuple[float, float]:
    """Return the most micro-batches before their backward, and how many more wait for W at the worst moment."""
    forward = waiting = 0
    most, worst = 0, (0, 0)
    for kind, _, _ in order:
        forward += (kind == "F") - (kind in ("B", "BW"))
        waiting += (kind == "B") - (kind == "W")
        most = max(most, forward)
        worst = max(worst, (forward + waiting, waiting))
    return most / parts, (worst[0] - most) / parts


@pytest.mark.parametrize("schedule", [*WHOLE, *FOLDED_SCHEDULES, "dualpipe"])
def test_memory_of_a_stage_matches_its_execution_order(schedule: str) -> None:
    for p in (2, 4, 8) if schedule == "dualpipe" else (2, 4, 5, 8):
        m = 4 * p
        if schedule in ("v-half", "v-min") and p % (2 if schedule == "v-half" else 3) == 0:
            m = 4 * p + 1  # the pattern is moved: it still holds no more
        for r, (most, later) in enumerate(held_by_order(schedule, p, m)):
            held = in_flight(schedule, *arrays(r, p, 1, m))[0]
            waiting = deferred(schedule, *arrays(r, p, m), weight_share=1.0)[0]
            if schedule in ("v-half", "v-min"):
                assert most <= held <= most + 1.0
            else:
                assert (held, held + waiting) == (most, most + later)


def test_interleaved_holds_megatrons_warm_up_and_one_more() -> None:
    for p, v in ((2, 2), (4, 3), (8, 2)):
        for r, (most, _) in enumerate(held_by_order("interleaved", p, 4 * p, v)):
            assert in_flight("interleaved", *arrays(r, p, v, 4 * p))[0] == most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_never_holds_more_than_all_micro_batches_or_the_schedules_limit(schedule: str) -> None:
    p, r = (x.ravel().astype(np.float64) for x in np.meshgrid(np.arange(1, 17), np.arange(16)))
    p, r = p[r < p], r[r < p]
    limits = {"gpipe": np.inf, "interleaved": 2.0 * p, "zb-h2": 2.0 * p - 1.0, "zb-2p": 2.0 * p - 1.0}
    limits |= {"dualpipe": p + 1.0, "dualpipev": p + 0.5}
    for m in (1.0, 3.0, 8.0, 100.0):
        held = in_flight(schedule, r, p, np.full_like(p, 2.0), np.full_like(p, m))
        waiting = deferred(schedule, r, p, np.full_like(p, m), 1.0)
        assert (held >= 1.0).all()
        assert (held <= limits.get(schedule, p)).all()
        assert (waiting >= 0.0).all()
        assert (held + waiting <= m).all()
        if schedule == "zb-2p":
            assert (held + waiting <= 2.0 * p).all()
