"""Hostile programs: what the self-test runs, and what the tests hold the sandbox to.

Nothing here knows how the sandbox defends itself.
"""

from rollpacker.sandbox.hostile.suite import Hostile, hostile_programs
from rollpacker.sandbox.hostile.world import Targets

__all__ = ["Hostile", "Targets", "hostile_programs"]
