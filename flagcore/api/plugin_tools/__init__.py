"""Tools for plugin authors: conformance checks and a scaffold."""
