"""Trainers and algorithms: from graded groups to one update.

Trainers know no engines and no schedule of a step.
"""
