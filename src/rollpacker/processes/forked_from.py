"""The first import of a fork server: programs of children cannot read its memory."""

from rollpacker.processes.children import keep_to_itself

keep_to_itself()
