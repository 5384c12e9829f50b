"""Memory and time of a serving engine for columns of candidates."""
