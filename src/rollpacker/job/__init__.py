"""One RL job: built from its configuration, resumed or started, and trained."""

from rollpacker.job.run.loop import train
from rollpacker.job.run.stopping import Stopped

__all__ = ["Stopped", "train"]
