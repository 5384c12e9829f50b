"""The report of a run as one HTML page. Its sections consist of plain blocks."""
