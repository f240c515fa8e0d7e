"""Programs aimed at whoever grades them: to be nobody's fault, or to cost time there."""

from rollpacker.sandbox.types import AssertTest, CallTest, StdinTest, Test

_LOWERED = "import resource\nresource.setrlimit(resource.RLIMIT_{}, ({}))\n"
_LOOP = "while True: pass\n"

BLAMING: dict[str, str] = {
    "cpu_limit_of_nothing": _LOWERED.format("CPU", "0, 0") + _LOOP,
    "cpu_limit_below_its_time": _LOWERED.format("CPU", "1, 1") + _LOOP,
    "cpu_limit_where_it_is_wrong": (
        "def f(x):\n try: 1 / 0\n except ZeroDivisionError:\n"
        "  import resource\n  resource.setrlimit(resource.RLIMIT_CPU, (0, 0))\n"
        "  while True: pass"
    ),
    "cpu_limit_in_exit_function": (
        "import atexit, resource\n@atexit.register\ndef g():\n"
        " resource.setrlimit(resource.RLIMIT_CPU, (0, 0))\n while True: pass\ndef f(x): return 0"
    ),
    "cpu_limit_that_is_caught": (
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_CPU, (0, 0))\n"
        "except ValueError: pass\n" + _LOOP
    ),
    "cpu_limit_by_number": (
        "import ctypes, platform\nlibc = ctypes.CDLL(None)\nnone = (ctypes.c_uint64 * 2)(0, 0)\n"
        "arm = platform.machine() == 'aarch64'\n"
        "libc.syscall(164 if arm else 160, 0, none)\n"
        "libc.syscall(261 if arm else 302, 0, 0, none, 0)\n"
        "libc.syscall(261 if arm else 302, 0, ctypes.c_long(1 << 32), none, 0)\n" + _LOOP
    ),
    "cpu_limit_without_its_signal": (
        "import resource, signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\n" + _LOOP
    ),
    "awake_at_each_tick": (
        "import time\nwhile True:\n now = time.monotonic()\n"
        " tick = (now // 0.004 + 1) * 0.004\n time.sleep(max(tick - now - 3e-4, 0))\n"
        " while time.monotonic() < tick + 2e-4: pass"
    ),
    "all_other_limits": (
        "import resource\nfor each in range(1, 16):\n"
        " try: resource.setrlimit(each, (0, 0))\n except (OSError, ValueError): pass\n"
        "def f(x): return f(x)"
    ),
    "no_address_space": _LOWERED.format("AS", "0, 0") + "x = [0] * 10 ** 7",
    "no_file_size": _LOWERED.format("FSIZE", "0, 0") + "def f(x): return 'a'",
    "no_file_size_and_its_signal": (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        + _LOWERED.format("FSIZE", "0, 0")
        + "def f(x): return 'a'"
    ),
    "no_stack": _LOWERED.format("STACK", "0, 0") + "def f(x): return f(x - 1)",
    "no_descriptors": _LOWERED.format("NOFILE", "0, 0") + "import os\nos.dup(0)",
    "no_memory_left": (
        "a = []\ntry:\n while True: a.append(b'x' * (1 << 20))\nexcept MemoryError: pass\n"
        "def f(x): return [0] * 10 ** 6"
    ),
    "kills_itself": "import os\nos.kill(os.getpid(), 9)",
    "kills_its_group": "import os\nos.killpg(0, 9)",
    "kills_its_zygote": "import os\nos.kill(os.getppid(), 9)",
    "kills_itself_by_number": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "for number in (62, 129, 130, 131, 138, 200, 234, 240, 297, 424):\n"
        " libc.syscall(number, os.getpid(), 9, 9, 9)\n" + _LOOP
    ),
    "raises_a_late_signal": "import signal\nsignal.raise_signal(signal.SIGRTMIN + 1)",
    "own_timer": "import signal\nsignal.setitimer(signal.ITIMER_PROF, 0.001)\n" + _LOOP,
    "forbidden_call": "import ctypes\nctypes.CDLL(None).syscall(39 | 0x40000000)\n" + _LOOP,
    "returns_into_nothing": "import ctypes\nctypes.CDLL(None).syscall(15)\n" + _LOOP,
    "closes_the_result": "import os\nos.close(3)\ndef f(x): return 0",
    "replaces_the_result": "import os\nos.dup2(1, 3)\ndef f(x): return 0",
    "writes_over_the_start": "import os\nos.pwrite(3, b'\\0', 0)\nos._exit(0)",
    "cuts_the_result": (
        "import ctypes, os\ntry: os.ftruncate(3, 0)\nexcept OSError: pass\n"
        "libc = ctypes.CDLL(None)\nfor number in (76, 77, 45, 46): libc.syscall(number, 3, 0)\n"
        "libc.fallocate(3, 3, 0, 4096)\nos._exit(0)"
    ),
    "half_a_result": 'import os\nos.write(3, b\'{"value":["l",[\')\nos._exit(0)',
    "ends_in_an_exit_function": (
        "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0"
    ),
    "ends_in_a_thread": (
        "import os, threading\ndef f(x):\n threading.Thread(target=os._exit, args=(0,)).start()"
    ),
    "key_without_decimals": "def f(x): return {10 ** 5000: 1}",
    "hidden_depth": (
        "import os\ntext = '{\"x\":\"\\u2200\",\"value\":' + '[\"l\",[' * 450 + ']]' * 450 + '}'\n"
        "os.write(3, text.encode('utf-16-le'))\nos._exit(0)"
    ),
}
"""Each ends itself, or its grading, in a way that could seem to be the sandbox's."""

_WRITE = "import json, os\ndef write(value):\n os.write(3, json.dumps({}, separators=(',', ':'))"
_WRITE = _WRITE.format("{'value': value}") + ".encode())\n os._exit(0)\n"
_RAW = "import os\nos.write(3, {})\nos._exit({})"
_CALL = CallTest(call="f", args=[1], expected={"a": 1})
_MANY = 40_000
_NUMBERS = CallTest(call="f", args=[1], expected={str(n): 0 for n in range(_MANY)})
_LINES = "".join(f"{n}.5\n" for n in range(50_000))
_OUTPUT = StdinTest(stdin="", stdout=_LINES)
# The hash of an integer is its remainder of this.
_P = "(2 ** 61 - 1)"

COSTLY: dict[str, tuple[str, Test]] = {
    "set_of_collisions": (
        f"{_WRITE}write(['s', [['i', format({_P} * n, 'x')] for n in range(1, {_MANY})]])",
        _CALL,
    ),
    "set_of_collisions_returned": (f"def f(x): return {{{_P} * n for n in range(2500)}}", _CALL),
    "dict_of_collisions": (
        f"{_WRITE}write(['d', [[['i', format({_P} * n, 'x')], None] for n in range({_MANY})]])",
        _CALL,
    ),
    "dict_of_as_many_collisions": (
        f"{_WRITE}write(['d', [[['i', format({_P} * n, 'x')], ['i', '0']]"
        f" for n in range({_MANY})]])",
        _NUMBERS,
    ),
    "dict_of_colliding_tuples": (
        f"{_WRITE}write(['d', [[['t', [['i', format({_P} * n, 'x')]]], ['i', '0']]"
        f" for n in range({_MANY})]])",
        _NUMBERS,
    ),
    "set_of_colliding_floats": (
        f"{_WRITE}write(['s', [['f', float({_P} * n).hex()] for n in range(1, {_MANY})]])",
        _CALL,
    ),
    "keys_of_many_digits": (
        f"{_WRITE}write(['d', [[['i', format(16 ** 3400 + n, 'x')], ['i', '0']]"
        " for n in range(580)]])",
        CallTest(call="f", args=[1], expected={str(n): 0 for n in range(580)}),
    ),
    "many_numbers": (f"{_WRITE}write(['l', [['i', '1']] * 190_000])", _CALL),
    "many_lists": (f"{_WRITE}write(['l', [['l', []]] * 220_000])", _CALL),
    "many_sets": (f"{_WRITE}write(['l', [['s', []]] * 220_000])", _CALL),
    "many_texts": (f"{_WRITE}write(['l', [''] * 680_000])", _CALL),
    "many_brackets": (_RAW.format("b'{\"value\":[' + b'[],' * 690_000 + b'[]]}'", 0), _CALL),
    "many_reports": (_RAW.format("b'{\"value\":[' + b'{},' * 690_000 + b'{}]}'", 0), _CALL),
    "many_quotes": (_RAW.format("b'{\"value\":\"' + b'\\\\\"' * 1_000_000 + b'\"}'", 0), _CALL),
    "error_of_many_lists": (
        _RAW.format("b'{\"error\":[' + b'[],' * 690_000 + b'[]]}'", 1),
        _CALL,
    ),
    "asserts_of_many_lists": (
        _RAW.format("b'{\"held\":[' + b'[],' * 690_000 + b'[]]}'", 0),
        AssertTest(asserts="assert f(1) == 2"),
    ),
    "float_of_many_digits": (f"{_WRITE}write(['f', '0x' + '1' * 2_000_000 + 'p0'])", _CALL),
    "float_of_a_long_exponent": (f"{_WRITE}write(['f', '0x1p' + '9' * 1_900_000])", _CALL),
    "integers_of_many_digits": (f"{_WRITE}write(['l', [['i', 'f' * 20_000]] * 100])", _CALL),
    "plain_integer_of_many_digits": (
        _RAW.format("b'{\"value\":' + b'9' * 2_000_000 + b'}'", 0),
        _CALL,
    ),
    "many_lines": ("import os\nos.write(1, b'\\n' * 4_000_000 + b'x')", _OUTPUT),
    "many_words": ("import os\nos.write(1, b'a ' * 350_000 + b'\\n' * 49_999 + b'x')", _OUTPUT),
    "many_words_in_a_line": (
        "import os\nos.write(1, b'a ' * 2_000_000)",
        StdinTest(stdin="", stdout="1.5 " * 100_000),
    ),
    "many_bad_bytes": ("import os\nos.write(1, b'\\xff' * 4_000_000)", _OUTPUT),
    "many_numbers_that_are_near": (
        "print('\\n'.join(f'{n}.50' for n in range(49_999)))",
        _OUTPUT,
    ),
}
"""Each would take long to read, to compare or to say no to."""
