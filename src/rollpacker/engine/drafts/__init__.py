"""What may follow, guessed from texts that were seen.

Nothing here knows the schedule.
"""
