"""The driver's side of emulated devices."""
