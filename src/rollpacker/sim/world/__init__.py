"""The policies' decisions in simulated time.

Nothing here decides, as in the runtime.
"""
