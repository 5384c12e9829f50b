"""mkdocs hook: adds pages of the repository that are not in docs/ to the site, and pages of the vendors.

Links between docs/ and other folders are shorter on the site, where all pages are in one folder.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify_unicode
from mkdocs.structure.files import File

from flagcore.plugins import engines
from flagcore.spec.convert import json_schema

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.site import vendor_pages  # noqa: E402

JOINED = {
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "LICENSE": "LICENSE",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/LOG.md": "lab-log.md",
    "findings/README.md": "findings.md",
}
"""Pages of other folders, and their names on the site."""
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
    """Add the pages of vendors, and those of other folders with adapted links. Called once per build."""
    for name, text in vendor_pages.pages().items():
        files.append(File.generated(config, name, content=text))
    for path, name in JOINED.items():
        text = (ROOT / path).read_text(encoding="utf-8").replace("](docs/", "](").replace("](../docs/", "](")
        for other in JOINED:
            if Path(other).parent == Path(path).parent:
                text = text.replace(f"]({Path(other).name}", f"]({JOINED[other]}")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, SCHEMA, content=json.dumps(json_schema(engines()), indent=2)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with adapted links, without those to scripts of findings. Called once per page."""
    for path, name in JOINED.items():
        markdown = markdown.replace(f"](../{path}", f"]({name}")
    markdown = re.sub(r"\[([^]]+)\]\((?:\.\./findings/)?\w+\.sh\)", r"\1", markdown)
    return re.sub(r"\]\(\.\./plugins/(\w+)/README\.md\)", r"](vendors/\1.md)", markdown)
