"""PolyTrace: workload traces of RL jobs: read, characterise, fit, generate, replay, compare.

It knows no runtime, no simulator and no policy.
"""
