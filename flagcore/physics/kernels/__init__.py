"""Times of single kernels, from a roofline of the chip or from measurements."""
