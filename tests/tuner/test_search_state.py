"""What is run again at the end, with made-up noise. Trials with fewer micro-batches or on fewer nodes, whose times are
scaled."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flagcore_testing.toy import ENGINE, Toy

from flagcore.contracts import Costs
from flagcore.domain.chip import CORES, OTHERS_CORES
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.plan import Plan
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Candidate, Columns, KnobValue
from flagcore.domain.spec import ClusterSpec, Control, Task
from flagcore.domain.trial import Measurement, Role, Shortened, Trial, TrialState
from flagcore.report.result import Result
from flagcore.tuner.search_state import MIN_NOISE, SearchState, next_repeat, noise, significant, speedup
from flagcore.tuner.shorten import FIXED_FACTOR, UNMODELLED_SHARE, scale_nodes, scale_steps, shorten
from flagcore.tuner.stages.learn import learn
from flagcore.tuner.stages.predict import predict_columns
from tests import tasks
from tests.checks import given
from tests.tuner.benches import Ended, job_of, sizes_of, write_steps
from tests.tuner.test_loop import BusyBench, OnTwoHosts, Player, batch_of, seconds

CONTROL = Control(repeats=1)


def trial(number: int, name: str, speed: float, role: Role = Role.SEARCH, spread: float = 0.0) -> Trial:
    step, candidate = 1.0 / speed, Candidate.of({"who": name})
    return tasks.trial(number, candidate, step, spread_s=spread * step, rate=speed, role=role)


def first(**speeds: float) -> list[Trial]:
    """The trials of a search: the first one is the baseline."""
    roles = [Role.BASELINE] + [Role.SEARCH] * (len(speeds) - 1)
    names = zip(speeds.items(), roles, strict=True)
    return [trial(number, name, speed, role) for number, ((name, speed), role) in enumerate(names)]


def names(trials: tuple[Trial, ...]) -> list[object]:
    return [each.candidate.as_dict()["who"] for each in trials]


def again(trials: list[Trial], control: Control, **speeds: list[float]) -> tuple[list[object], SearchState]:
    """Run repeats until no more is wanted; each takes the next of its candidate's speeds, the last one for ever."""
    trials, order = list(trials), list[object]()
    left = {name: list(arguments) for name, arguments in speeds.items()}
    while (repeat := next_repeat(control, learn(trials))) is not None:
        name = str(repeat.candidate.as_dict()["who"])
        order.append(name)
        speed = left[name].pop(0) if len(left[name]) > 1 else left[name][0]
        trials.append(trial(len(trials), name, speed, Role.REPEAT))
        assert len(order) < 99
    return order, learn(trials)


def test_baseline_best_and_two_rivals_run_again_in_rotation() -> None:
    known = first(base=50.0, a=100.0, b=99.5, c=99.0, d=98.5, far=90.0)
    assert names(learn(known).finalists) == ["base", "a", "b", "c"]
    assert names(learn(known).rivals) == ["b", "c", "d"]
    order, _ = again(known, CONTROL, base=[50.0], a=[100.0], b=[99.5], c=[99.0], d=[98.5])
    assert order == ["base", "a", "b", "c"]


def test_noisy_steps_make_more_rivals() -> None:
    known = first(base=50.0, a=100.0, b=95.0)
    assert learn(known).rivals == ()
    known[1] = trial(1, "a", 100.0, spread=0.08)
    assert names(learn(known).rivals) == ["b"]


def test_the_noise_of_runs_is_half_of_their_difference() -> None:
    assert noise([trial(0, "a", 90.0), trial(1, "a", 100.0), trial(2, "a", 110.0)]) == pytest.approx(0.1)


def test_a_candidate_that_breaks_a_limit_is_not_a_rival() -> None:
    slow = trial(2, "b", 99.5)
    broken = replace(slow, measurement=replace(given(slow.measurement), broken=("ttft_s.p99 is 2 s, over 1 s",)))
    known = first(base=50.0, a=100.0)
    assert names(learn([*known, slow]).rivals) == ["b"]
    assert learn([*known, broken]).rivals == ()


def test_a_much_slower_candidate_is_distinguished_despite_noise() -> None:
    known = [*first(base=50.0, a=100.0, b=99.0), trial(3, "slow", 25.0, spread=2.0)]
    assert names(learn(known).rivals) == ["b"]
    assert names(learn([*known[:3], trial(3, "slow", 35.0, spread=2.0)]).rivals) == ["b", "slow"]


@pytest.mark.parametrize(("longer", "apart"), [(0.02, True), (0.0199, False)])
def test_two_low_noise_candidates_are_distinguished_by_run_to_run_noise(longer: float, apart: bool) -> None:
    assert significant(longer, first(a=100.0), first(b=100.0)) is apart
    assert significant(0.6 * MIN_NOISE, 4 * first(a=100.0), 4 * first(b=100.0))  # the noise of four runs is half


def test_of_equals_that_ran_again_the_best_has_the_fewest_settings_that_differ_from_the_baseline() -> None:
    known = first(base=50.0, a=100.0, b=99.0, once=100.5)
    closer = replace(known[2], candidate=Candidate.of({"who": "base", "other": 1}))
    again = [replace(each, number=5 + each.number, role=Role.REPEAT) for each in (known[1], closer)]
    farther = [replace(each, candidate=Candidate.of({"who": "a", "other": 2})) for each in (known[1], again[0])]
    best = learn([known[0], farther[0], closer, known[3], farther[1], again[1]]).best
    assert given(best).candidate == closer.candidate


def test_of_equals_within_the_spread_of_their_runs_the_simpler_wins() -> None:
    base, fast = trial(0, "base", 50.0, Role.BASELINE), trial(1, "a", 107.0)
    simple = replace(trial(2, "a", 96.0), candidate=Candidate.of({"who": "base", "other": 1}))
    fast = replace(fast, candidate=Candidate.of({"who": "a", "other": 2}))
    repeats = [
        replace(fast, number=3, role=Role.REPEAT, measurement=trial(3, "a", 93.0).measurement),
        replace(simple, number=4, role=Role.REPEAT, measurement=trial(4, "a", 97.0).measurement),
    ]
    assert given(learn([base, fast, simple, *repeats]).best).candidate == simple.candidate
    repeats[0] = replace(repeats[0], measurement=trial(3, "a", 106.0).measurement)
    assert given(learn([base, fast, simple, *repeats]).best).candidate == fast.candidate


def test_a_candidate_that_ran_once_above_the_best_runs_again_even_after_all_repeats() -> None:
    names_of_many = {f"c{number}": 100.0 + number for number in range(8)}
    noisy = [
        replace(each, measurement=replace(given(each.measurement), spread_s=0.1 / each.speed))
        for each in first(base=50.0, **names_of_many)
    ]
    order, state = again(noisy, CONTROL, base=[50.0], **{name: [80.0] for name in names_of_many})
    assert state.faster_once == ()
    assert {name for name in names_of_many if name not in order} <= {"c0", "c1", "c2"}
    assert again(noisy, replace(CONTROL, repeats=0), base=[50.0])[0] == []


def test_a_larger_indifference_ends_the_race_earlier() -> None:
    known, speeds = first(base=50.0, a=100.0, b=98.9), {"base": [50.0], "a": [100.0], "b": [98.9]}
    order, _ = again(known, replace(CONTROL, indifference=0.05), **speeds)
    assert order == ["base", "a", "b"]


@pytest.mark.parametrize(("best", "runs"), [(150.0, 1), (55.0, 3)])
def test_a_baseline_that_is_far_slower_runs_again_once(best: float, runs: int) -> None:
    order, _ = again(first(base=50.0, a=best), Control(repeats=3), base=[50.0], a=[best])
    assert order.count("base") == runs


def shortened(known: Trial, interval: float) -> Trial:
    """The trial as if its steps had been scaled, with an 80% interval of that share either way."""
    measured = known.measurement
    low, high = ((1.0 + sign * interval) * measured.step_time_s for sign in (-1, 1))
    scaled = replace(measured, scaled_from=measured.step_time_s / 8, low_s=low, high_s=high)
    return replace(known, measurement=scaled)


def test_shortened_finalists_run_whole_once_even_without_repeats() -> None:
    known = [shortened(each, 0.01) for each in first(base=50.0, a=100.0, far=80.0)]
    order, search_state = again(known, Control(repeats=0), base=[48.0], a=[97.0])
    assert order == ["base", "a"]
    assert search_state.speed_of(search_state.best.candidate) == 97.0
    assert search_state.reported_trial(search_state.best).is_final
    trials = [shortened(each, 0.01) for each in first(base=100.0, far=50.0)]
    assert again(trials, Control(repeats=0), base=[99.0])[0] == ["base"]


def test_a_new_leader_after_whole_runs_runs_whole_too() -> None:
    known = [shortened(each, 0.01) for each in first(base=50.0, lucky=110.0, b=100.0)]
    order, search_state = again(known, Control(repeats=0), base=[50.0], lucky=[90.0], b=[98.0])
    assert order == ["base", "lucky", "b"]
    assert names((given(search_state.best),)) == ["b"]


def test_the_interval_of_the_scaling_makes_rivals() -> None:
    plain = first(base=50.0, a=100.0, b=95.0)
    assert learn(plain).rivals == ()
    assert names(learn([plain[0], *(shortened(each, 0.06) for each in plain[1:])]).rivals) == ["b"]


def test_a_whole_run_that_fails_is_not_tried_for_ever() -> None:
    known = [shortened(each, 0.01) for each in first(base=50.0, a=100.0)]
    failed = replace(trial(2, "a", 1.0, Role.REPEAT), state=TrialState.OUT_OF_MEMORY, measurement=None)
    order, _ = again([*known, failed], Control(repeats=0), base=[48.0])
    assert order == ["base"]


def test_a_baseline_that_is_the_best_is_run_again_only_with_a_rival() -> None:
    assert next_repeat(CONTROL, learn(first(base=100.0, a=90.0))) is None
    order, _ = again(first(base=100.0, a=99.0), CONTROL, base=[100.0], a=[99.0])
    assert order[:2] == ["base", "a"]


def test_an_interrupted_repeat_runs_again_but_a_failed_repeat_does_not() -> None:
    known = first(base=50.0, a=100.0)
    interrupted = replace(trial(2, "base", 1.0, Role.REPEAT), state=TrialState.INTERRUPTED, measurement=None)
    repeat = next_repeat(CONTROL, learn([*known, interrupted]))
    assert repeat.number == 0
    repeat = next_repeat(CONTROL, learn([*known, replace(interrupted, state=TrialState.FAILED)]))
    assert repeat.number == 1


@pytest.mark.parametrize(("last", "reported"), [(50.0 * (1 + MIN_NOISE / 2), False), (46.0, True), (54.0, True)])
def test_drift_of_the_machine_is_visible_in_the_baseline(last: float, reported: bool) -> None:
    trials = [*first(base=50.0, a=100.0), trial(2, "base", 49.9, Role.REPEAT), trial(3, "base", last, Role.REPEAT)]
    assert learn(trials).drift == pytest.approx(last / 50.0 - 1)
    assert learn(trials).drifted is reported


@pytest.mark.parametrize(("others", "is_repeated"), [(0.7, True), (0.4, False), (0.1, False)])
def test_a_trial_on_cores_that_others_used_runs_again_if_it_may_be_the_best(others: float, is_repeated: bool) -> None:
    base, best, slow = first(base=50.0, a=100.0, b=75.0)
    measured = replace(given(slow.measurement), telemetry={CORES: 2.0, OTHERS_CORES: others})
    known = [base, best, replace(slow, state=TrialState.STOPPED, measurement=measured)]
    order, state = again(known, CONTROL, base=[50.0], a=[100.0], b=[120.0])
    assert ("b" in order) == is_repeated
    assert next_repeat(replace(CONTROL, repeats=0), learn(known)) is None
    assert state.speed_of(slow.candidate) == pytest.approx(120.0 if is_repeated else 0.0)
    assert (state.reported_trial(given(state.best)) in state.repeats) == is_repeated


def test_a_disturbed_baseline_runs_again_and_its_round_does_not_count() -> None:
    base, best = first(base=20.0, a=100.0)
    measured = replace(given(base.measurement), telemetry={CORES: 2.0, OTHERS_CORES: 1.2})
    known = [replace(base, measurement=measured), best]
    order, state = again(known, Control(repeats=2), base=[50.0], a=[100.0])
    assert "base" in order
    assert speedup(learn(known), "").rounds == pytest.approx((4.0,))
    assert (speedup(state, "").value, speedup(state, "").low) == pytest.approx((1.0, 1.0))


LONG = tasks.task(global_batch_size=512, control=Control(max_step_time=60.0))


class Linear(Toy):
    """Predicts a step of 20 s that it takes once, and `per_sample` seconds a sample."""

    def __init__(self, once: float = 20.0, per_sample: float = 1.0) -> None:
        self.once, self.per_sample = once, per_sample

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        step = self.once + self.per_sample * task.spec.train.global_batch_size
        return replace(super().predict(task, columns, costs), step_time_s=np.array([step]))


def shorter(task: Task, step_s: float | None, engine: Linear, **values: KnobValue) -> Shortened | None:
    candidate = tasks.candidate(**values)
    columns = ENGINE.columns(task, candidate.as_dict())
    return shorten(tasks.platform(task, engine=engine), candidate, columns, step_s)


def test_a_long_step_runs_fewer_micro_batches_and_is_scaled_by_the_model() -> None:
    short = shorter(LONG, 532.0, Linear(), data_parallel_size=4, micro_batch_size=2)
    assert (short.global_batch_size, short.whole) == (64, 512)  # 8 of 64 micro-batches: 60 s of 532 s are 7.2
    assert short.scale == pytest.approx(532.0 / 84.0)


def test_the_interval_covers_half_and_twice_the_fixed_part() -> None:
    short = scale_steps(64, 512, 84.0, 532.0)
    assert short.low == pytest.approx((20 * FIXED_FACTOR + 512) / (20 * FIXED_FACTOR + 64))
    assert short.high == pytest.approx((20 / FIXED_FACTOR + 512) / (20 / FIXED_FACTOR + 64))
    assert short.low < short.scale < short.high < 8.0
    single = scale_steps(64, 512, 64.0, 512.0)
    one = 64.0 * UNMODELLED_SHARE  # of a step without a fixed part
    assert single.low == pytest.approx((one + 512) / (one + 64))
    assert single.scale == single.high == 8.0


@pytest.mark.parametrize(
    ("most", "step"), [(None, 1e4), (60.0, 59.0), (60.0, None)], ids=["off", "short enough", "unknown"]
)
def test_other_steps_run_whole(most: float | None, step: float | None) -> None:
    task = tasks.task(global_batch_size=512, control=Control(max_step_time=most))
    assert shorter(task, step, Linear()) is None


def test_steps_run_whole_if_the_model_predicts_no_time_or_no_gain() -> None:
    assert shorter(LONG, 600.0, Linear(once=math.nan)) is None
    assert shorter(LONG, 600.0, Linear(once=600.0, per_sample=0.0)) is None


def test_the_model_scales_only_parts_that_grow_with_the_batch() -> None:
    task = tasks.task(global_batch_size=512, devices=4)
    columns = ENGINE.columns(task, {"data_parallel_size": 2, "pipeline_model_parallel_size": 2})

    def predicted(some: Task) -> float:
        return float(predict_columns(tasks.platform(some), columns).step_time_s[0])

    short = scale_steps(16, 512, predicted(task.with_batch(16)), predicted(task))
    assert 8.0 < short.low <= short.scale <= short.high < 32.0


def test_a_measurement_of_shortened_steps_is_scaled_to_whole_steps() -> None:
    measured = Measurement(
        step_times_s=(2.0, 4.0), step_time_s=3.0, spread_s=1.0, tokens_per_second_per_device=100.0, device_used_bytes=7
    )
    full = scale_steps(64, 512, 84.0, 532.0).scaled(measured)
    scale = 532.0 / 84.0
    assert full.step_times_s == pytest.approx((2.0 * scale, 4.0 * scale))
    assert (full.step_time_s, full.spread_s) == pytest.approx((3.0 * scale, scale))
    assert full.tokens_per_second_per_device == pytest.approx(100.0 * 8.0 / scale)
    assert (full.scaled_from, full.device_used_bytes) == (3.0, 7)
    assert full.low_s < full.step_time_s < full.high_s
    assert given(full.modelled_s) == pytest.approx(3.0 * scale - 3.0)


BATCH, NODES = 64, 4
CLUSTER = ClusterSpec(chip="test-chip", nodes=NODES, devices_per_node=2, nic_bytes_per_second=1e9)


class Nodes(Player):
    """Plays launches on as many nodes as their batch shows: a step takes 2.5% more for each doubling."""

    def start(self, launch: Launch) -> Ended:
        self.launches.append(launch)
        nodes = batch_of(launch) * NODES // BATCH
        step = seconds(*sizes_of(launch), BATCH) * (1.0 + 0.025 * math.log2(nodes))
        write_steps(launch, 1000 * step)
        return Ended(Exit(code=0, ended_by=None, duration_s=10.0 + 3 * step))


@pytest.fixture
def bench(tmp_path: Path) -> BusyBench:
    created = BusyBench(tmp_path, Nodes())
    created.cluster = CLUSTER
    return created


def nodes_of(trial: Trial) -> int:
    return trial.shortened.nodes if trial.shortened else NODES


def best_of(plan: Plan) -> Trial:
    assert plan.best.measurement is not None
    return plan.best


def test_trials_run_on_fewer_nodes_with_fewer_replicas_and_the_same_batch_of_each(bench: BusyBench) -> None:
    plan = bench.plan(BATCH, trial_nodes=1, repeats=1, max_trials=4)
    assert {batch_of(launch) for launch in bench.player.launches} == {BATCH // NODES}
    assert {nodes_of(trial) for trial in (*plan.trials, *plan.repeats)} == {1}
    for trial, launch in zip(plan.trials, bench.player.launches, strict=False):
        values = trial.candidate.as_dict()
        assert values["data_parallel_size"] == NODES * int(job_of(launch)["knobs"]["data_parallel_size"])
    best = best_of(plan)
    assert best.is_final
    assert best.measurement.low_s < best.measurement.step_time_s < best.measurement.high_s
    record = Result.write(plan, "run")["best"]
    assert record["shortened"]["nodes"] == 1
    assert record["measured"]["step_time_s"]["scaled_from"] == given(best.measurement.scaled_from)


def test_a_candidate_that_cannot_run_on_fewer_nodes_is_illegal(bench: BusyBench) -> None:
    plan = bench.plan(BATCH, trial_nodes=1, max_trials=20)
    assert plan.counts.illegal["trial_nodes"] > 0
    assert all(int(trial.candidate.as_dict()["data_parallel_size"]) % NODES == 0 for trial in plan.trials)  # type: ignore[call-overload]


class Hosts(Nodes, OnTwoHosts):
    """Plays launches on hosts, of which `gone` ends each trial that it has, until it is not usable any more."""

    gone, losses = "d", 0

    def start(self, launch: Launch) -> Ended:
        played = super().start(launch)
        if self.gone not in launch.hosts:
            return played
        self.losses += 1
        return Ended(Exit(code=1, ended_by="host", duration_s=1.0, lost_host=self.gone))

    def usable_hosts(self, hosts: Sequence[str]) -> tuple[str, ...]:
        return tuple(host for host in hosts if host != self.gone or self.losses < 2)

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        return self.usable_hosts(hosts)[:count]


@pytest.mark.parametrize(("gone", "nodes"), [("d", 3), ("", NODES)])
def test_without_spares_trials_continue_on_the_hosts_that_are_left(bench: BusyBench, gone: str, nodes: int) -> None:
    bench.launcher = player = Hosts()
    player.gone = gone
    bench.cluster = replace(CLUSTER, hosts=("a", "b", "c", "d"), min_nodes=2)
    plan = bench.plan(BATCH, repeats=1, max_trials=3, max_step_time=None)
    ran = [launch for launch in player.launches if gone not in launch.hosts or not gone]
    assert {(len(launch.hosts), batch_of(launch)) for launch in ran} == {(nodes, BATCH * nodes // NODES)}
    assert {(trial.state, nodes_of(trial)) for trial in plan.trials} == {(TrialState.MEASURED, nodes)}
    assert [nodes_of(event.trial) for event in bench.events if event.trial.inconclusive] == [NODES] * player.losses
    scaled_from = best_of(plan).measurement.scaled_from  # type: ignore[union-attr]
    assert (scaled_from is None) == (nodes == NODES)


def test_the_scale_to_all_nodes_is_as_predicted_and_uncertain_by_the_growth() -> None:
    def scaled(of_nodes: int) -> Shortened:
        return scale_nodes(replace(LONG, spec=replace(LONG.spec, cluster=ClusterSpec(nodes=of_nodes))), 8, 1.3)

    scale = scaled(64)
    assert scale.scale == pytest.approx(1.3)
    assert scale.low < 1.3 - 0.3 * 0.6 < 1.3 + 0.3 * 0.6 < scale.high
    assert scaled(4096).high > scale.high  # growth that the model does not include
    assert scale.own < (scale.high - scale.low) / 2 / scale.scale  # its own part of it
