"""The tutorial for plugins works: its files are written and its commands run, in order."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from flagcore.plugins import ENGINES, names

pytestmark = pytest.mark.long

PAGE, DATA = (
    (Path(__file__).parents[2] / "docs" / name).read_text("utf-8") for name in ("write-a-plugin.md", "plugin-data.md")
)
pytestmark = [pytest.mark.long, pytest.mark.slow]

STEP = re.compile(
    r"\*\*`(?P<file>[^`]+)`\*\*(?P<end> \(at its end\))?\n\n```\w+\n(?P<text>.*?)```|```bash\n(?P<run>.*?)```", re.S
)
BUILD = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")


@dataclass
class Follower:
    """Follows the page in `folder`. `printed` is the output of each command."""

    folder: Path
    printed: dict[str, str]

    def run(self, command: str, status: int = 0) -> str:
        """Run a command line with the plugins of this checkout and the new one."""
        bin_folder = self.folder / "tools"
        path = [str(self.folder / "site"), str(self.folder / "flagcore-acme"), *(entry for entry in sys.path if entry)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self) -> None:
        """Stand for `pip install -e`: the metadata is installed, the modules are those in the folder."""
        self.run(f"{sys.executable} {' '.join(BUILD)} --target site ./flagcore-acme")
        shutil.rmtree(self.folder / "site" / "flagcore_acme")


@pytest.fixture(scope="module")
def followed_page(tmp_path_factory: pytest.TempPathFactory) -> Follower:
    """The page, followed from its first command to its last, and then the data files of the next page."""
    pytest.importorskip("hatchling", reason="building the plugin needs hatchling")
    if "megatron" not in names(ENGINES):
        pytest.skip("flagcore itself is not installed here, so it has no engine")
    folder = tmp_path_factory.mktemp("guide")
    (folder / "tools").mkdir()
    for name, code in {
        "flag": "from flagcore.cli import main; main()",
        "pytest": "import pytest, sys; sys.exit(pytest.main())",
    }.items():
        (folder / "tools" / name).write_text(f"#!{sys.executable}\n{code}\n")
        (folder / "tools" / name).chmod(0o755)
    follower = Follower(folder, {})
    for step in STEP.finditer(PAGE + DATA.partition("## An add-on instead")[0]):
        if step["file"]:
            file = folder / step["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((file.read_text() if step["end"] else "") + step["text"])
            continue
        for command in (line for line in step["run"].splitlines()):
            if command == "pip install --no-deps -e flagcore-acme":
                follower.install()
            elif not command.startswith("pip install"):
                follower.printed[command] = follower.run(command)
    return follower


def test_the_page_shows_what_its_commands_print(followed_page: Follower) -> None:
    (table,) = re.findall(r"```text\n(# +DP .*?)```", PAGE, re.DOTALL)
    assert followed_page.printed["flag estimate plan.yaml --top 3"].startswith(table.rstrip())


def test_the_new_plugin_passes_every_check_at_its_start_and_at_its_end(followed_page: Follower) -> None:
    reports = (
        followed_page.printed["flag plugins check flagcore-acme"],
        followed_page.run("flag plugins check flagcore-acme"),
    )
    assert all(re.match(r"acme 0\.1\.0: \d{2,} passed, 0 failed", report) for report in reports)
    assert " passed" in followed_page.printed["pytest flagcore-acme/tests"]


def test_the_plan_uses_the_measured_kernels_and_the_rule(followed_page: Follower) -> None:
    assert "acme_pod" in followed_page.run("flag explain plan.yaml")
    rows = json.loads(followed_page.run("flag estimate plan.yaml --json"))
    assert rows
    assert max(row["candidate"]["tensor_model_parallel_size"] for row in rows) <= 4
    errors = followed_page.run("flag estimate plan.yaml --no-plugin acme 2>&1", status=4)
    assert "'A1' is not supported by any installed plugin" in errors


def test_the_job_is_tuned_with_the_environment_of_the_plugin(followed_page: Follower) -> None:
    result = json.loads((followed_page.folder / "first" / "result.json").read_text())
    assert result["chip"] == "A1"
    assert result["baseline"]["state"] == "measured"
    assert {trial["state"] for trial in result["trials"]} <= {"measured", "stopped"}  # a busy machine may stop one
    launched = json.loads((followed_page.folder / "first/trials/0/launch.json").read_text())
    assert launched["environment"]["ACME_LAUNCH_QUEUES"] == "1"


def test_an_add_on_overrides_the_vendors_plugin(followed_page: Follower) -> None:
    (source,) = re.findall(r"\*\*`flagcore_site/hooks.py`\*\*\n\n```python\n(.*?)```", DATA, re.DOTALL)
    site = followed_page.folder / "site"
    (site / "flagcore_site").mkdir()
    (site / "flagcore_site" / "hooks.py").write_text(source)
    info = site / "flagcore_site-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flagcore-site\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flagcore.plugins]\nsite = flagcore_site.hooks\n")
    ask = "from flagcore.plugins import load_plugins as l; p = l(); print(p.environment(p.find_chip('A1'), 'megatron'))"
    assert "'ACME_LAUNCH_QUEUES': '2'" in followed_page.run(f'{sys.executable} -c "{ask}"')
