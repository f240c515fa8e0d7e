"""Emulated devices: the real runtime at the size of a cluster, without its GPUs.

Driver, policies, channels, rewards, journal and logs are those of every run. What stands for
engines and replicas is the simulator's workers on the wall clock: responses have forced lengths,
and each piece of work takes its calibrated time, divided by a factor. Nothing is trained.
"""
