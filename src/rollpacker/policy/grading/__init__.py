"""How long grading may take, what the judge may use, when a reward function is broken.

Nothing here grades.
"""
