"""What pages show works: engines as distributions of their own, hooks and their arguments, the notebook, the site. The
tutorial for plugins works: its files are written and its commands run, in order."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from flagcore_testing.examples import FOREIGN_CHIP, task_on
from flagcore_vendorkit.engines import Quirks

from docs.site import vendor_pages
from docs.site.tables import HOOKS as SPECS
from flagcore.contracts import Engine
from flagcore.domain.cluster import NodeGroup
from flagcore.plugins import ENGINES, LoadedPlugins, names
from flagcore.plugins.validation import check_protocol

DOCS = Path(__file__).parents[2] / "docs"


def test_every_hook_is_documented_with_its_arguments() -> None:
    documented = re.findall(r"^## (flagcore_\w+\(.*\))$", (DOCS / "hooks.md").read_text(), re.MULTILINE)
    arguments = {name: list(inspect.signature(hook).parameters)[1:] for name, hook in SPECS.items()}
    assert documented == [f"{name}({', '.join(names)})" for name, names in arguments.items()]


def test_the_page_of_plugins_lists_every_section_of_the_quirks() -> None:
    page = (DOCS / "plugin-data.md").read_text()
    assert set(re.findall(r"^\| `([a-z]+)` \| .* \| `flagcore_", page, re.MULTILINE)) == set(Quirks.__annotations__)
    assert set(re.findall(r"`(flagcore_[a-z]+_[a-z_]+)`", page)) <= set(SPECS)


def test_the_examples_of_all_hooks_work_as_one_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / "hooks.md").read_text(), re.DOTALL)
    exec(compile("\n".join(snippets), "docs/hooks.md", "exec"), vars(module))
    loaded = LoadedPlugins.of({"acme": module})
    (plugin,) = loaded.plugins
    assert set(plugin.hooks) == set(SPECS)
    chip = loaded.find_chip("ACME A1")
    assert chip is not None
    for each in (chip, FOREIGN_CHIP):
        group, task = NodeGroup(chip=each, nodes=1, devices_per_node=8), task_on(each)
        is_own = each is chip
        assert bool(loaded.topology(group)) == is_own
        assert bool(loaded.memory_model(group, "megatron")) == is_own
        assert bool(loaded.kernel_costs(each, "megatron")) == is_own
        assert bool(loaded.collective_costs(group, "megatron")) == is_own
        assert bool(loaded.environment(each, "megatron")) == is_own
        assert bool(loaded.knobs(each, "megatron")) == is_own
        advice = loaded.check_task(task)
        assert [bool(advice.rules), bool(advice.failures)] == [is_own, is_own]
        assert loaded.engine_support(each, "megatron").device_type == ("acme" if is_own else None)
    assert loaded.devices() == ()
    assert loaded.failures == ()


PAGE = (Path(__file__).parents[2] / "docs" / "write-an-engine.md").read_text("utf-8")
FILES = dict(re.findall(r"\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page, and the metadata of an installed distribution."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    info = tmp_path / "acme_train-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-train\nVersion: 1.0\n")
    (target,) = re.findall(r'^acme = "(.*)"$', FILES["pyproject.toml"], re.MULTILINE)
    (info / "entry_points.txt").write_text(f"[flagcore.engines]\nacme = {target}\n")
    return tmp_path


@pytest.mark.long
def test_the_training_engine_is_tuned(folder: Path) -> None:
    command = [sys.executable, "-c", "from flagcore.cli import main; main()", "tune", "train-acme.yaml", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {trial["state"] for trial in result["trials"]} == {"measured"}
    assert result["best"]["candidate"] == {"data_parallel_size": 2, "micro_batch_size": 4}
    assert result["gain"] == pytest.approx(1.5, abs=0.1)


def test_the_engines_define_what_has_no_default() -> None:
    for name in ("acme_train.py", "acme_serving.py"):
        module = {"__name__": name.removesuffix(".py")}
        exec(compile(FILES[name], name, "exec"), module)
        assert check_protocol(Engine, module["ENGINE"]) is module["ENGINE"]


NOTEBOOK = Path(__file__).parents[2] / "examples" / "tune.ipynb"


@pytest.mark.long
def test_the_notebook_tunes_and_shows_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("megatron.core")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            *body, last = ast.parse("".join(cell["source"])).body
            assert isinstance(last, ast.Expr)
            exec(compile(ast.Module(body, []), cell["id"], "exec"), names)
            shown = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names)
            assert getattr(shown, "_repr_html_", shown.__repr__)()
    assert names["outcome"].plan.best
    assert list(names["trials"]["number"]) == [0, 1, 2]


ROOT = Path(__file__).parents[2]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
JOINED = {"CONTRIBUTING.md", "CHANGELOG.md", "benchmarks.md", "findings.md", "lab-log.md"}
LOADED = re.compile(r'<(?:script|img|iframe|link)[^>]*\s(?:src|href)="?(?:https?:)?//|@import|url\("?https?:')
"""What a browser would fetch from elsewhere; links that a reader may follow are none of it."""


def test_each_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    pages = {str(file.relative_to(docs)) for file in docs.rglob("*.md")} | JOINED | vendor_pages.pages().keys()
    assert sorted(_pages(SITE["nav"])) == sorted(pages)


def test_first_page_leads_to_every_page() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#]+)", (docs / "index.md").read_text(encoding="utf-8")))
    assert {file.name for file in docs.glob("*.md")} - linked == {"index.md"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="`make docs` installs mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_loads_nothing_from_elsewhere(built: Path) -> None:
    files = [*built.rglob("*.html"), *built.rglob("*.css")]
    assert files
    assert {file.name: found.group() for file in files if (found := LOADED.search(file.read_text()))} == {}


def _pages(nav: list[Any]) -> Iterator[str]:
    for part in nav:
        ((_, inner),) = part.items()
        yield from _pages(inner) if isinstance(inner, list) else [inner]


PLUGIN_PAGE, DATA = (
    (Path(__file__).parents[2] / "docs" / name).read_text("utf-8") for name in ("write-a-plugin.md", "plugin-data.md")
)


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
    for step in STEP.finditer(PLUGIN_PAGE + DATA.partition("## An add-on instead")[0]):
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


@pytest.mark.long
def test_the_page_shows_what_its_commands_print(followed_page: Follower) -> None:
    (table,) = re.findall(r"```text\n(# +DP .*?)```", PLUGIN_PAGE, re.DOTALL)
    assert followed_page.printed["flag estimate plan.yaml --top 3"].startswith(table.rstrip())


@pytest.mark.long
def test_the_new_plugin_passes_every_check_at_its_start_and_at_its_end(followed_page: Follower) -> None:
    reports = (
        followed_page.printed["flag plugins check flagcore-acme"],
        followed_page.run("flag plugins check flagcore-acme"),
    )
    assert all(re.match(r"acme 0\.1\.0: \d{2,} passed, 0 failed", report) for report in reports)
    assert " passed" in followed_page.printed["pytest flagcore-acme/tests"]


@pytest.mark.long
def test_the_plan_uses_the_measured_kernels_and_the_rule(followed_page: Follower) -> None:
    assert "acme_pod" in followed_page.run("flag explain plan.yaml")
    rows = json.loads(followed_page.run("flag estimate plan.yaml --json"))
    assert rows
    assert max(row["candidate"]["tensor_model_parallel_size"] for row in rows) <= 4
    errors = followed_page.run("flag estimate plan.yaml --no-plugin acme 2>&1", status=4)
    assert "'A1' is not supported by any installed plugin" in errors


@pytest.mark.long
def test_the_job_is_tuned_with_the_environment_of_the_plugin(followed_page: Follower) -> None:
    result = json.loads((followed_page.folder / "first" / "result.json").read_text())
    assert result["chip"] == "A1"
    assert result["baseline"]["state"] == "measured"
    assert {trial["state"] for trial in result["trials"]} <= {"measured", "stopped"}  # a busy machine may stop one
    launched = json.loads((followed_page.folder / "first/trials/0/launch.json").read_text())
    assert launched["environment"]["ACME_LAUNCH_QUEUES"] == "1"


@pytest.mark.long
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
