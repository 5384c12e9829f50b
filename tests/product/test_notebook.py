"""The notebook in `examples`: its cells run one after the other, and what a cell ends with is shown."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tune.ipynb"


@pytest.mark.slow
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
