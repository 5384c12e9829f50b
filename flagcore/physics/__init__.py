"""Memory and time of transformers from their shape: numbers in, numbers out, in SI units."""
