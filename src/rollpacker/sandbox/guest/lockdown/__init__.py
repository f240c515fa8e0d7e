"""The lockdown of a child before it runs a program: system calls, files, privileges."""
