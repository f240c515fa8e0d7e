"""What a child gives up before it runs a program: system calls, files, privileges.

Nothing here knows what a program or a test is.
"""
