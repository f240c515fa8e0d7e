"""Trainers and algorithms: from graded groups to one update."""
