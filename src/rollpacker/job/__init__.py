"""One RL job: built from its configuration, resumed or started, and trained."""

from rollpacker.job.loop import train

__all__ = ["train"]
