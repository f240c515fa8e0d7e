"""The inside of the sandbox: the fork server and its children.

An interpreter without site-packages imports it as the top-level package ``guest``. It therefore
uses only the standard library and relative imports, and holds no secret.
"""
