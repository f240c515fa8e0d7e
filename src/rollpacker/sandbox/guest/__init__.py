"""What runs on the inside: the zygote and its children.

It is imported as the top-level package ``guest`` by an interpreter without site-packages, so it
uses the standard library and relative imports only, and holds nothing worth stealing.
"""
