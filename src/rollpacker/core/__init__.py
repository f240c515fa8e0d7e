"""The vocabulary: types, events, decisions, policies and their journal."""
