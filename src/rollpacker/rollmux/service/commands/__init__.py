"""The effect of each request: checked against the state, recorded and answered, independent of
HTTP."""
