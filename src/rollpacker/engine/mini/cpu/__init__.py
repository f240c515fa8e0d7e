"""The forward pass and the sampler on a CPU, compiled by numba.

Nothing here knows which sequences run, or why.
"""
