"""Imported by a process that others are forked off: what numba does before its first function, half
a second of CPU time, is done once for all of them."""

from numba import njit

njit(lambda: None)()
