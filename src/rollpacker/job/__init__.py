"""One RL job: built from its configuration, resumed or started, and trained.

It knows all parts of one job, and no other job.
"""

from rollpacker.job.run.loop import train
from rollpacker.job.run.stopping import Stopped

__all__ = ["Stopped", "train"]
