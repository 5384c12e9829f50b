"""One page that tells a run: sections of plain blocks, made once and written as HTML or as Markdown."""
