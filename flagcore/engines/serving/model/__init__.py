"""Memory and time of an engine that serves, for whole columns of candidates."""
