"""Memory and time of a serving engine, for whole columns of candidates."""
