"""The report of a run as one page. Its sections consist of plain blocks, which are rendered as HTML or text."""
