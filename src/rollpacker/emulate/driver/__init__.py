"""The driver's side of emulated devices.

Nothing here decodes or trains.
"""
