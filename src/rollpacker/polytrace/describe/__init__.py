"""What a workload is like, in numbers and in words.

Nothing here fits or generates.
"""
