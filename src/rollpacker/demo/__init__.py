"""The main job on a laptop: warm start, training, comparison of modes.

Nothing of the library knows the demo.
"""
