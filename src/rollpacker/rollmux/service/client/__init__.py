"""The client side of the daemon, for jobs, nodes and commands."""

from rollpacker.rollmux.service.client.client import LeaseLostError, MuxClient
from rollpacker.rollmux.service.client.phase import Phases, StateLostError

__all__ = ["LeaseLostError", "MuxClient", "Phases", "StateLostError"]
