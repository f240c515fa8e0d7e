"""The interface as data: routes, bodies, answers and roles."""
