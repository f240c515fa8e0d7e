"""The inside of a worker's process: an engine, a training replica, or both. A worker knows its
driver's messages, and no step, policy or other worker."""
