"""The report of a run as one page: sections of plain blocks, rendered as HTML or Markdown."""
