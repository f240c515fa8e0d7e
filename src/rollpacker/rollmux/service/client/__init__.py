"""The daemon as jobs, nodes and commands see it.

Nothing here knows the daemon's inside.
"""

from rollpacker.rollmux.service.client.client import LeaseLostError, MuxClient
from rollpacker.rollmux.service.client.phase import Phases, StateLostError

__all__ = ["LeaseLostError", "MuxClient", "Phases", "StateLostError"]
