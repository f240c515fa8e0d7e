"""Emulated devices: the real runtime at the size of a cluster, without its GPUs.

Driver, policies, channels, rewards, journal and logs are those of every run. Engines and replicas
are the simulator's workers on the wall clock. Responses have forced lengths, and each action takes
its calibrated time divided by a factor. Nothing is trained.
"""
