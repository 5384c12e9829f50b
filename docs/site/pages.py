"""mkdocs hook: adds the pages of the repository's root to the site, and the generated parts to all pages.

Links between docs/ and the root are shorter by one folder on the site.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify_unicode
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
JOINED = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
SCHEMA = "spec.schema.json"
"""The JSON Schema of specs, of which every version of the site has its own."""


def on_config(config: Any) -> Any:
    """Keep Chinese characters in anchors of headings, like GitHub; mike's builds have a menu of versions.

    Called once per build.
    """
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    config.mdx_configs["toc"]["slugify"] = slugify_unicode
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root, with adapted links. Called once per build."""
    for name in JOINED:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, SCHEMA, content=(ROOT / "examples" / SCHEMA).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with generated parts and adapted links. Called once per page."""
    from docs.site.tables import filled

    for name in JOINED:
        markdown = markdown.replace(f"](../{name}", f"]({name}")
    return filled(markdown)
