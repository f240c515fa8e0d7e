"""What a child gives up before it runs a program: system calls, files, privileges."""
