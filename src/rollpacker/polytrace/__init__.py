"""PolyTrace: workload traces of RL jobs: read, characterise, fit, generate, replay, compare."""
