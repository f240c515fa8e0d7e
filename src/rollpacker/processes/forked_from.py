"""What a fork server imports first: no child of it, nor what that starts, looks into it."""

from rollpacker.processes.children import keep_to_itself

keep_to_itself()
