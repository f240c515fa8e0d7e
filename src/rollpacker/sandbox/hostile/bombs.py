"""Programs that use up time, memory or room, and the verdicts that they may have."""

CPU, IDLE, CRASH = {"tle_cpu"}, {"tle_idle"}, {"crash"}
SPENT = CPU | CRASH

BOMBS: dict[str, tuple[str, set[str]]] = {
    "endless_loop": ("while True: pass", CPU),
    "endless_loop_in_c": ("sum(iter(int, 1))", CPU),
    "catches_everything": (
        "while True:\n try:\n  while True: [0] * 999\n except BaseException: pass",
        CPU,
    ),
    "ignores_signals": (
        "import signal\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n"
        " except OSError: pass\nwhile True: pass",
        CPU,
    ),
    "endless_sleep": ("import time\nwhile True: time.sleep(1000)", IDLE),
    "many_sleeps": ("import time\nwhile True: time.sleep(0.01)", IDLE | CPU),
    "waits_for_signal": ("import signal; signal.pause()", IDLE),
    "waits_for_nothing": ("import select; select.select([], [], [])", IDLE),
    "waits_for_lock": (
        "import _thread; l = _thread.allocate_lock(); l.acquire(); l.acquire()",
        IDLE,
    ),
    "stops_itself": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('resumed')",
        IDLE | CRASH,
    ),
    "stops_by_raise": ("import signal; signal.raise_signal(signal.SIGSTOP)", IDLE | CRASH),
    "timer_storm": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)\nwhile True: pass",
        CPU,
    ),
    "fork_bomb": ("import os\nwhile True: os.fork()", CRASH),
    "fork_bomb_that_goes_on": (
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        CPU,
    ),
    "thread_bomb": (
        "import _thread, time\nwhile True: _thread.start_new_thread(time.sleep, (99,))",
        CRASH,
    ),
    "memory_bomb": ("a = []\nwhile True: a.append(bytearray(1 << 24))", SPENT),
    "memory_bomb_at_once": ("a = bytearray(1 << 40)", CRASH),
    "memory_bomb_that_goes_on": (
        "a = []\nwhile True:\n try: a.append(bytearray(1 << 20))\n except MemoryError: pass",
        CPU,
    ),
    "map_bomb": ("import mmap\na = []\nwhile True: a.append(mmap.mmap(-1, 1 << 26))", SPENT),
    "shared_map_bomb": (
        "import mmap, os\nos.pwrite(1, b'x', 1 << 22)\na = []\n"
        "while True: a.append(mmap.mmap(1, 1 << 22))",
        SPENT,
    ),
    "disk_fill": ("f = open('/tmp/fill', 'wb')\nwhile True: f.write(bytes(1 << 20))", CRASH),
    "output_flood": ("while True: print('x' * 100000)", SPENT | {"fail"}),
    "output_flood_that_goes_on": (
        "import os\nwhile True:\n try: os.write(1, bytes(1 << 20))\n except OSError: pass",
        CPU,
    ),
    "sparse_output": ("import os\nos.pwrite(1, b'x', 1 << 40)", CRASH),
    "error_flood": ("import os\nwhile True: os.write(2, bytes(1 << 20))", SPENT),
    "result_flood": ("import os\nwhile True: os.write(3, bytes(1 << 20))", SPENT | {"fail"}),
    "descriptor_bomb": ("import os\na = [os.dup(1) for _ in range(10 ** 6)]", CRASH),
    "recursion": ("def f(): f()\nf()", SPENT),
    "deep_recursion": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): return f() + 1\nf()",
        SPENT,
    ),
    "deep_recursion_in_c": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\na = []\n"
        "for _ in range(10 ** 6): a = [a]\nrepr(a)",
        SPENT,
    ),
    "parser_bomb": ("(" * 100_000, SPENT),
    "parser_bomb_of_names": ("x" + ".a" * 200_000, SPENT),
    "parser_bomb_of_signs": ("-" * 200_000 + "1", SPENT),
    "constant_bomb": ("x = 9 ** 9 ** 9", SPENT),
    "constant_bomb_of_text": ("x = 'a' * (10 ** 12)", CRASH),
    "constant_bomb_of_shifts": ("x = 1 << (1 << 40)", CRASH),
    "number_bomb": (
        "import sys\nsys.set_int_max_str_digits(0)\nint('9' * 10 ** 7)",
        CPU,
    ),
    "pattern_bomb": ("import re; re.match('(a+)+$', 'a' * 40 + 'b')", CPU),
    "exit_bomb": ("import atexit\n@atexit.register\ndef f():\n while True: pass", CPU),
    "finaliser_bomb": (
        "class A:\n def __del__(self):\n  while True: pass\na = A(); del a",
        CPU,
    ),
    "flush_bomb": (
        "import sys\nclass A:\n closed = False\n def flush(self):\n  while True: pass\n"
        "sys.stdout = A()",
        CPU,
    ),
    "segmentation_fault": ("import ctypes; ctypes.string_at(0)", CRASH),
    "abort": ("import os; os.abort()", CRASH),
    "null_bytes": ("x = 1\0", CRASH),
    "surrogates": ("print('\\ud800')", CRASH),
    "exception_that_explodes": (
        "class E(Exception):\n def __str__(self): raise SystemExit(0)\nraise E",
        CRASH,
    ),
    "closes_everything": ("import os\nos.closerange(0, 64)\nprint(1)", CRASH),
}
