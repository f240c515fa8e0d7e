"""The log on disk and the answers that were given: in SQLite or in Postgres.

A store knows no meaning of what it keeps.
"""
