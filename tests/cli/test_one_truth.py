"""Each figure of a run has one value on every screen: the table, JSON, lists, the page, explain, compare and Python."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flagcore import api
from flagcore.domain.chip import CORES, OTHERS_CORES
from flagcore.plugins.entry_points import PAGES, names
from flagcore.report.formats import shown
from flagcore.tuner.stages import measure
from tests.cli.conftest import TRAIN, Flag, Project
from tests.page_reading import read

pytestmark = pytest.mark.slow
DISTURBED, FAILED = "0", "5"
"""The trials beside which other programs used the cores, and that failed: a first run and a repeat."""
UNEVEN = TRAIN.replace(
    "sys.argv = [sys.argv[1], folder]",
    f"""\
number = folder.rpartition("trials/")[2]
if number == {FAILED!r}:
    sys.exit("ValueError: it is broken")
with open(folder + "/job.json") as file:
    job = json.load(file)
job["global_batch_size"] *= 2.0 if number == {DISTURBED!r} else 1.0 + 0.01 * int(number)
with open(folder + "/job.json", "w") as file:
    json.dump(job, file)
sys.argv = [sys.argv[1], folder]""",
)
"""Later trials are slower, as on a machine that drifts."""


class Uneven(Project):
    train = UNEVEN


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with a disturbed and a failed run among those of the best and the baseline."""
    project, taken = Uneven(tmp_path_factory.mktemp("uneven")), measure.Readings.summary
    numbers = iter(range(99))
    with pytest.MonkeyPatch.context() as patch:
        busy = {CORES: 2.0, OTHERS_CORES: 1.5}
        patch.setattr(
            measure.Readings,
            "summary",
            lambda self: {**taken(self), **(busy if next(numbers) == int(DISTURBED) else {OTHERS_CORES: 0.0})},
        )
        api.tune(project.spec(control={"max_trials": 4, "repeats": 2}), run_dir=project.run_dir)
    yield project.run_dir
    assert project.all_gone()


def test_every_screen_has_the_same_figures(run_dir: Path, flag: Flag) -> None:
    def answer(*command: str) -> Any:
        return json.loads(flag(*command, "--json").worked().out)

    data, text, run = (
        answer("runs", "show", str(run_dir)),
        flag("runs", "show", str(run_dir)).out,
        api.load_run(run_dir),
    )
    assert run.best
    assert run.baseline
    runs = {each["trial"]: each for each in data["runs"]}
    states = {each["number"]: each["state"] for each in (*data["trials"], *data["repeats"])}
    assert states[int(FAILED)] == "failed"
    left_out = {number: why for each in runs.values() for number, why in each["not_counted"].items()}
    assert left_out == {DISTURBED: "other programs used its cores", FAILED: "failed"}
    sides = {name: run.search_state.all_runs(getattr(run, name).candidate) for name in ("best", "baseline")}
    of = {
        name: next(each for each in runs.values() if each["counted"] == [t.number for t in side.counted])
        for name, side in sides.items()
    }
    assert max(len(each["counted"]) for each in of.values()) > 1
    best_s, base_s = (sides[name].median_s or 0.0 for name in ("best", "baseline"))
    rates = {name: each["tokens_per_second_per_device"] for name, each in of.items()}

    gain = data["gain"]
    assert gain == pytest.approx(base_s / best_s - 1.0) == pytest.approx(rates["best"] / rates["baseline"] - 1.0)
    assert gain == data["speedup"]["value"] == run.gain
    (listed,) = answer("runs", "list", str(run_dir))
    assert (listed["speedup"], listed["value"]) == pytest.approx((gain, rates["best"]))
    both = answer("compare", str(run_dir), "baseline")
    assert (both["gap"], both["a"]["measured"]["step_time_s"]) == pytest.approx((gain, best_s))
    assert [both[side]["measured"]["runs"] for side in "ab"] == [len(of[name]["counted"]) for name in of]
    explained = answer("explain", str(run_dir), "best")
    assert explained["expected_s"] == pytest.approx(best_s)
    predicted = next(each for each in data["trials"] if each["number"] == of["best"]["trial"])["predicted"]
    assert explained["predicted"]["step_time_s"] == both["a"]["predicted"]["step_time_s"] == predicted["step_time_s"]

    assert f"{gain:+.1%} tokens/s" in text
    assert f"Speed: {shown(rates['best'])} tokens/s/device" in text
    assert f"Step time: {shown(best_s)} s" in text
    rows = {
        int(line.split()[0]): line
        for line in re.findall(r"^\d+ .*", text, re.MULTILINE)
        if "%" in line or "not c" in line
    }
    first = of["best"]["trial"]
    assert f"{shown(rates['best'])}  {gain:+.1%}" in re.sub(" +", "  ", rows[first])
    assert "measured, not counted: other programs used its cores" in rows[int(DISTURBED)]
    for command in (
        ("explain", str(run_dir)),
        ("explain", str(run_dir), "best"),
        ("compare", str(run_dir), "baseline"),
    ):
        assert shown(best_s) in flag(*command).out
    assert "not counted: other programs used its cores" in flag("explain", str(run_dir), DISTURBED).out

    if names(PAGES):
        facts = read(api.report(run_dir)).facts("summary")
        assert facts["Speedup over the baseline"].value == pytest.approx(gain)
        assert facts["Speed"].value == pytest.approx(rates["best"])
