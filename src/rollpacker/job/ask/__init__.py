"""Questions about a job or a checkpoint. They train nothing and change no run."""
