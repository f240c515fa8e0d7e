"""Imported last by the process that workers are forked off: what each of them would do first is
done once.

Numba loads its registries before its first function, and a collection looks at every object of
every library, which copies their pages: half of a start's CPU time.
"""

import gc

from numba import njit

njit(lambda: None)()
gc.collect()
gc.freeze()
