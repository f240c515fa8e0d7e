"""Top-k and top-p sampling of the rows that ask for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollpacker.engine.mini.runner import Draws, Floats, Ints
from rollpacker.engine.nucleus import restricted_draw


def restrict(
    draws: Draws, row: Callable[[np.int32], Floats], tokens: Ints, logprobs: Floats
) -> None:
    """Draw those again that want top-k or top-p; ``row`` gives logits (vocabulary,) by row."""
    limited = (draws.top_p < 1) | (draws.top_k > 0)
    for i in np.flatnonzero(limited & (draws.temperatures > 0)):
        tokens[i], logprobs[i] = restricted_draw(
            row(draws.rows[i]),
            float(draws.temperatures[i]),
            int(draws.top_k[i]),
            float(draws.top_p[i]),
            float(draws.uniforms[i]),
        )
