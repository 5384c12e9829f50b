"""Times of single kernels: from a chip's facts and a curve, or from measurements."""
