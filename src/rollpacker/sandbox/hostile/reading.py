"""Programs that read what is not theirs. One that succeeds prints ESCAPED."""

PRELUDE = """
import ctypes, json, os, sys
world = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
machine = os.uname().machine
def syscall(x86, arm, *arguments):
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return libc.syscall(ctypes.c_long(x86 if machine == "x86_64" else arm), *wide)
def escaped_if(condition):
    if condition:
        print("ESCAPED")
"""

READING = {
    "read_passwd": "escaped_if(open('/etc/passwd').read())",
    "read_secret": "escaped_if(open(world['secret']).read())",
    "read_secret_by_libc": "escaped_if(libc.open(world['secret'].encode(), 0) >= 0)",
    "read_secret_by_openat2": """
how = (ctypes.c_uint64 * 3)(0, 0, 0)
escaped_if(syscall(437, 437, -100, world["secret"].encode(), how, 24) >= 0)
""",
    "read_packages": "escaped_if(open(world['package'], 'rb').read(1))",
    "read_trainer_environment": "escaped_if(open(f'/proc/{world[\"pid\"]}/environ').read())",
    "read_parent_environment": "escaped_if(open(f'/proc/{os.getppid()}/environ').read())",
    "read_own_memory_map": "escaped_if(open('/proc/self/maps').read())",
    "read_parent_memory": "escaped_if(open(f'/proc/{os.getppid()}/mem', 'rb'))",
    "read_environment": "escaped_if(os.environ)",
    "read_environment_by_libc": """
block = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
escaped_if(block and block[0])
""",
    "list_trainer_descriptors": "escaped_if(os.listdir(f'/proc/{world[\"pid\"]}/fd'))",
    "list_root": "escaped_if(os.listdir('/'))",
    "list_folder": "escaped_if(os.listdir(world['folder']))",
    "read_link": "escaped_if(os.readlink('/proc/self/cwd'))",
    "open_by_handle": """
handle = (ctypes.c_uint32 * 32)(120)
mount = ctypes.c_int()
path = world["secret"].encode()
escaped_if(syscall(303, 264, -100, path, handle, ctypes.byref(mount), 0) == 0)
""",
    "other_descriptors": """
import fcntl
def is_open(descriptor):
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFD) >= 0
    except OSError:
        return False
escaped_if(any(map(is_open, range(4, 4096))))
""",
    "working_folder": "escaped_if(open(os.path.basename(world['secret'])) or True)",
    "earlier_program": """
import builtins, gc
planted = hasattr(builtins, "planted") or "planted-by-earlier" in sys.modules
escaped_if(planted or any(type(o) is set and "planted-by-earlier" in o for o in gc.get_objects()))
""",
    "kernel_log": "escaped_if(syscall(103, 116, 3, ctypes.create_string_buffer(999), 999) >= 0)",
}

PLANT = """
import builtins, sys
builtins.planted = {"planted-by-earlier"}
sys.modules["planted-by-earlier"] = sys
"""
