"""The formats of the published PolyTrace suite."""
