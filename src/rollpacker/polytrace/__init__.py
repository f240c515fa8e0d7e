"""PolyTrace: read, characterise, fit, generate, replay and compare workload traces of RL jobs."""
