"""What people, scripts and Prometheus see of the state.

A look changes nothing.
"""
