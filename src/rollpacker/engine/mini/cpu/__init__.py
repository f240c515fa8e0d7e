"""The forward pass and the sampler on a CPU, compiled by numba."""
