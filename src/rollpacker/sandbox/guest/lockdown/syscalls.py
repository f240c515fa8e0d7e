"""System calls that a program may make, with their numbers by machine.

All others are refused, also those of newer kernels: no fork, exec, sockets, signals, links,
permissions, memfd, shared memory, io_uring, bpf, keys or namespaces.
"""

from __future__ import annotations

MACHINES = ("x86_64", "aarch64")  # machines with a column in the tables, in this order

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# The most frequent first: the filter is a list.
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "brk": (12, 214),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "lseek": (8, 62),
    "close": (3, 57),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "mremap": (25, 216),
    "futex": (202, 98),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "clock_gettime": (228, 113),
    "getrandom": (318, 278),
    "exit_group": (231, 94),
    "exit": (60, 93),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "stat": (4, None),
    "lstat": (6, None),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    "pause": (34, None),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getcpu": (309, 168),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "membarrier": (324, 283),
}

ZYGOTE: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "wait4": (61, 260),
    "kill": (62, 129),
    "pidfd_open": (434, 434),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "close_range": (436, 436),
    "prctl": (157, 167),
    "landlock_restrict_self": (446, 446),
}  # further calls of the fork server, and of a child until its lockdown

OPEN: dict[str, tuple[int | None, int | None, int]] = {
    "openat": (257, 56, 2),
    "open": (2, None, 1),
}
"""Allowed for reading if Landlock restricts the files. The third is the argument with the flags."""

FCNTL = (72, 25)
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_DUPFD_CLOEXEC. Owners would send
signals."""

IOCTL = (16, 29)
IOCTL_REQUESTS = (0x5401, 0x5450, 0x5451)  # TCGETS (is it a terminal?), FIONCLEX, FIOCLEX

PRLIMIT = (302, 261)
"""Only for the process itself (0). Interpreters set limits by it too. CPU limits are refused."""
