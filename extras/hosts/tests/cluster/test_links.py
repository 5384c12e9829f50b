"""Hosts behind slow links: their rate is measured before the first trial, predictions use it, and a slow one is
named."""

import json
from pathlib import Path

import pytest
import yaml

from extras.hosts.tests.cluster.bed import FAST_NETWORK, Bed, missing
from extras.hosts.tests.cluster.conftest import Project, Tune
from flagcore.api.runs import load_snapshot
from tests.product.cli.conftest import TRAIN

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_the_links_between_hosts_are_measured_and_used(tmp_path: Path) -> None:
    if reason := missing("tc"):
        pytest.skip(reason)
    (tmp_path / "bed").mkdir()
    bed = Bed(tmp_path / "bed")
    for name in bed.names:
        bed.set_rate(name, "400mbit" if name != "h2" else "80mbit")
    project = Project(bed, tmp_path)
    project.write_spec(trials=1, compare=True, batch=12, nic_latency_seconds=0.001)
    tune = Tune(project)
    tune.finish()
    bed.close()
    slow = [line for line in tune.output().splitlines() if line.startswith(("h1: ", "h2: ", "h3: "))]
    assert [line[:2] for line in slow] == ["h2"]
    network = json.loads((project.run_dir / "task.json").read_text())["fixed"]["network"]
    assert network["nic_bytes_per_second"] == pytest.approx(10e6, rel=0.3)  # of h2, with one device per host
    assert 0 < network["nic_latency_seconds"] < 0.1
    chip = load_snapshot(project.run_dir, None, ()).task.cluster.groups[0].chip
    assert chip.nic_bytes_per_second is not None
    assert chip.nic_bytes_per_second.value == network["nic_bytes_per_second"]
    assert chip.nic_latency_seconds == 0.001


def test_hosts_with_two_networks_use_the_one_of_their_names(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    (tmp_path / "bed").mkdir()
    bed = Bed(tmp_path / "bed", 2)
    bed.add_network()
    for name in bed.names:
        bed.cut(name)
    project = Project(bed, tmp_path)
    (project.folder / "hosts.txt").write_text("f1 slots=1\nf2 slots=1\n")
    (project.folder / "train.py").write_text(f"import os\nprint(os.environ['NETWORK'])\n{TRAIN}")
    project.write_spec(trials=1, compare=True, spares=0)
    spec = yaml.safe_load((project.folder / "spec.yaml").read_text())
    spec["envs"]["NETWORK"] = "{interface} {address}"
    (project.folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    tune = Tune(project)
    tune.finish()
    bed.close()
    assert "cannot be compared" not in tune.output()
    logs = {number: project.run_dir / f"trials/0/hosts/f{number}/stdout.log" for number in (1, 2)}
    networks = {number: log.read_text().split("\n", 1)[0] for number, log in logs.items()}
    assert networks == {number: f"eth1 {FAST_NETWORK}.{10 + number}" for number in (1, 2)}
