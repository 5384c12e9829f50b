"""The page of findings, which scripts outside CI check, and the releases that rules name."""

from pathlib import Path

import pytest

from tools import findings, releases

ROOT = Path(__file__).parents[2]
FOUND = list(findings.findings())


def test_the_table_of_findings_is_current() -> None:
    assert (findings.FOLDER / "README.md").read_text(encoding="utf-8") == findings.table(FOUND), (
        "run `python tools/findings.py table`"
    )


@pytest.mark.parametrize("finding", FOUND, ids=lambda each: each.name)
def test_a_finding_pins_and_prints_the_release_of_its_package(finding: findings.Finding) -> None:
    package, release = finding.fields["Package"].split(",")[0].split()
    text = (findings.FOLDER / finding.name).read_text(encoding="utf-8")
    assert f"{package}=={release}" in text.split()
    assert f"{package} {release}" in finding.fields["Output"]


def test_the_page_of_engines_has_all_findings() -> None:
    page = (ROOT / "docs" / "engines-really.md").read_text(encoding="utf-8")
    assert [each.name for each in FOUND if f"](../findings/{each.name})" not in page] == []


def test_a_script_that_fails_has_changed(tmp_path: Path) -> None:
    (tmp_path / "same.sh").write_text("echo 1")
    (tmp_path / "changed.sh").write_text("echo 'the output changed' >&2; exit 1")
    assert findings.run(tmp_path / "same.sh") == ""
    assert findings.run(tmp_path / "changed.sh") == "the output changed"


def test_a_comment_without_a_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.sh").write_text("#!/bin/sh\n# A surprise.\n#\n# Topic: Caches\nset -eu\n")
    with pytest.raises(ValueError, match=r"some\.sh: the comment must have the fields"):
        list(findings.findings(tmp_path))


def test_releases_are_read_from_the_rules(tmp_path: Path) -> None:
    rules = tmp_path / "engines" / "some" / "flagcore_some"
    rules.mkdir(parents=True)
    (rules / "rules.yaml").write_text("# vllm 0.9 and vLLM 0.33: `config.py`\nkey: 1  # DeepSpeed 0.19.8\n")
    found = releases.seen(tmp_path)
    assert found == {
        "deepspeed": {"0.19.8": ["engines/some/flagcore_some/rules.yaml:2"]},
        "vllm": {release: ["engines/some/flagcore_some/rules.yaml:1"] for release in ("0.33", "0.9")},
    }
    assert releases.table(found).splitlines()[-1] == "| `vllm` | 0.33, 0.9 |"
