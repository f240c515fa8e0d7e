"""Read the files of a run."""
