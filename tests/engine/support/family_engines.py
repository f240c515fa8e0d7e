"""What vLLM makes of every family, on a CPU: whether it samples with the weights that it is given.

``python family_engines.py FILE [FAMILY ...]`` writes what was found to a file of families' results.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "train" / "support"))

import families
import numpy as np
from engine_models import reference_logprobs, request
from vllm_beside import Beside

STALE = 0.05
"""Nats by which weights that were not taken up would be off, at the least."""


def difference(model: Any, outputs: Any, asked: Any) -> float:
    """The largest between what was sampled with and the model's own log-probabilities, nats."""
    return max(
        float(np.abs(outputs[r.attempt].logprobs - wanted).max())
        for r in asked
        for wanted in [reference_logprobs(model, r.prompt, outputs[r.attempt].tokens)]
    )


def measure(name: str, beside: Beside) -> list[float]:
    """The worst of one token under the first weights, and under others after a reload."""
    models = families.make(name, 1), families.make(name, 2)
    rng = np.random.default_rng(0)
    asked = [
        request(
            i,
            rng.integers(2, families.VOCABULARY, 6 + 3 * i).astype(np.int32),
            seed=i,
            ignore_stop=True,
        )
        for i in range(6)
    ]
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        beside.build(models[0], folder)
        for version, (model, other) in enumerate((models, models[::-1])):
            beside.load(model, version)
            outputs = beside.sample(asked)
            assert difference(other, outputs, asked) > STALE
            found.append(difference(model, outputs, asked))
    return found


def main(path: Path, names: list[str]) -> None:
    """Every family; a child that fails leaves process groups behind, so the next has its own."""
    results = json.loads(path.read_text())
    beside = Beside()
    for name in names or families.CONFIGURATIONS:
        try:
            said = ", ".join(f"{worst:.0e}" for worst in measure(name, beside))
        except (AssertionError, ValueError, RuntimeError, EOFError) as error:
            said = " ".join(str(error).split()) or "its process died"
            said = re.sub(r"^.*cannot run \S+ here: ", "", said)
            beside.close()
            beside = Beside()
        results["families"].setdefault(name, {})["vllm"] = said
        sys.stdout.write(f"{name}: {said}\n")
        sys.stdout.flush()
    beside.close()
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
