"""Times of collectives over the levels of a cluster."""
