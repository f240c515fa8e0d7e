"""How families of models write calls of tools, one file each: what is read, and what is written.

Nothing here knows which format a model has, nor that a reply may begin with reasoning.
"""
