"""One RL job: built from its configuration, resumed or started, and trained."""

from rollpacker.job.loop import train
from rollpacker.job.signals import Stopped

__all__ = ["Stopped", "train"]
