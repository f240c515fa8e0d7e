"""The interface as data: routes, bodies, answers, roles.

Nothing here does anything.
"""
