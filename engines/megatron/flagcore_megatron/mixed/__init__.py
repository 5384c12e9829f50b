"""Clusters with several kinds of chips: the parallel sizes and the layers of each node group."""
