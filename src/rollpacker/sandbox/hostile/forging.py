"""Programs that want to pass without the answer, which they are not told."""

FORGED_CALLS = {
    "prints_marker": """
def f(world):
    print('+{"value":true}', flush=True)
    return 0
""",
    "exits_at_once": "import os; os._exit(0)",
    "exits_politely": "import sys; sys.exit(0)",
    "exits_in_call": "def f(world): raise SystemExit",
    "always_equal": """
class Equal:
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
def f(world): return Equal()
""",
    "always_equal_text": """
class Equal(str):
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0
def f(world): return Equal("x")
""",
    "always_equal_in_list": """
class Equal(list):
    __eq__ = lambda self, other: True
def f(world): return [Equal()]
""",
    "searches_frames": """
import sys
def f(world):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if isinstance(value, dict) and "expected" in value:
                return value["expected"]
            if isinstance(value, str) and value.startswith("expected-"):
                return value
        frame = frame.f_back
""",
    "searches_heap": """
import gc, re
def f(world):
    for thing in gc.get_objects():
        for item in gc.get_referents(thing):
            if type(item) in (str, bytes):
                text = item if type(item) is str else item.decode("latin1")
                found = re.search("expected-[0-9a-f]{32}", text)
                if found:
                    return found[0]
""",
    "searches_descriptors": """
import os, re
def f(world):
    for descriptor in range(64):
        try:
            data = os.pread(descriptor, 1 << 20, 0)
        except OSError:
            continue
        found = re.search(b"expected-[0-9a-f]{32}", data)
        if found:
            return found[0].decode()
""",
    "patches_encoder": """
import sys
for name, module in list(sys.modules.items()):
    for each in ("encode", "_encode_collection", "_call", "_call_hook", "perform"):
        if name.startswith("guest") and hasattr(module, each):
            setattr(module, each, lambda *a, **k: True)
def f(world): return None
""",
    "patches_json": """
import json
json.dumps = lambda *a, **k: '{"value":true,"held":true,"verdict":"pass"}'
def f(world): return None
""",
    "patches_comparison": """
import builtins, math, operator
math.isclose = operator.eq = builtins.all = lambda *a, **k: True
def f(world): return 0
""",
    "writes_verdict": """
import os
os.write(3, b'{"value":true,"held":true,"verdict":"pass"}')
os._exit(0)
""",
    "writes_many_results": """
import os
for n in range(100):
    os.write(3, b'{"value":["i","%x"]}' % n)
os._exit(0)
""",
    "writes_pickle": """
import os, pickle
class Evil:
    def __reduce__(self): return (os.system, ("touch /tmp/escaped",))
os.write(3, pickle.dumps(Evil()))
os._exit(0)
""",
    "json_depth": "import os; os.write(3, b'{\"value\":' + b'[' * 10 ** 6); os._exit(0)",
    "json_depth_closed": """
import os
os.write(3, b'{"value":' + b'["l",[' * 10 ** 5 + b']]' * 10 ** 5 + b'}'); os._exit(0)
""",
    "json_integer": "import os; os.write(3, b'{\"value\":' + b'9' * 10 ** 6 + b'}'); os._exit(0)",
    "json_typed_integer": """
import os
os.write(3, b'{"value":["i","' + b'f' * 10 ** 6 + b'"]}'); os._exit(0)
""",
    "json_not_a_number": "import os; os.write(3, b'{\"value\":NaN}'); os._exit(0)",
    "json_unhashable": """
import os
os.write(3, b'{"value":["s",[["l",[]]]]}'); os._exit(0)
""",
    "json_bad_text": 'import os; os.write(3, b\'{"value":"\\xff"}\'); os._exit(0)',
    "json_surrogates": """
import os
os.write(3, b'{"value":"' + b'\\\\ud800' * 1000 + b'"}'); os._exit(0)
""",
    "returns_nested": """
def f(world):
    value = []
    for _ in range(100000):
        value = [value]
    return value
""",
    "returns_itself": """
def f(world):
    value = []
    value.append(value)
    return value
""",
    "returns_huge_integer": "def f(world): return 1 << 10 ** 7",
    "returns_many": "def f(world): return [0] * 10 ** 7",
    "returns_generator": "def f(world): return (x for x in world)",
    "looks_not_started": """
import os
for attack in (
    lambda: os.ftruncate(3, 0),
    lambda: os.truncate("/proc/self/fd/3", 0),
    lambda: os.open("/proc/self/fd/3", os.O_WRONLY | os.O_TRUNC),
    lambda: os.posix_fallocate(3, 0, 0),
    lambda: os.kill(os.getpid(), 9),
):
    try:
        attack()
    except OSError:
        pass
os._exit(0)
""",
    "swaps_module": """
import sys, types
other = types.ModuleType("solution")
sys.modules["solution"] = sys.modules["__main__"] = other
def f(world): return other
""",
}

FORGED_ASSERTS = {
    "asserts_exit_at_once": "import os; os._exit(0)",
    "asserts_exit_politely": "import sys; sys.exit(0)",
    "asserts_exit_in_call": "import os\ndef f(world): os._exit(0)",
    "asserts_stop_in_call": "def f(world): raise SystemExit(0)",
    "asserts_marker": "def f(world):\n    print('+{\"held\":true}')",
}

FORGED_OUTPUT = {
    "reads_own_output": "import os; print(os.pread(1, 999, 0).decode())",
    "reads_past_input": "import os, sys; sys.stdin.read(); print(os.pread(0, 999, 1 << 16))",
    "input_is_output": "import os; os.dup2(1, 0); print(os.read(0, 999).decode())",
    "output_is_input": "import os; os.dup2(0, 1); print('x', flush=True)",
    "closes_output": "import os; os.close(1)",
    "prints_marker_as_script": "print('pass'); print('+{\"verdict\":\"pass\"}')",
}
