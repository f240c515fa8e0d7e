"""An environment whose module takes its time to load, for the matrix."""

from __future__ import annotations

import time

from chatting import Chat

time.sleep(1.0)
__all__ = ["Chat"]
