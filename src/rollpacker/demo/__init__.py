"""The main job on a laptop: warm start, training, comparison of modes."""
