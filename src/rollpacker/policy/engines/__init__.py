"""Which engines the devices form, at which size, and the engines of a tail."""
