"""Programs that make, signal or inspect processes. One that succeeds prints ESCAPED."""

PROCESSES = {
    "fork": """
if os.fork() == 0:
    os._exit(0)
escaped_if(True)
""",
    "fork_by_number": """
pid = syscall(57, 220, 17, 0, 0, 0, 0)
if pid == 0:
    os._exit(0)
escaped_if(pid > 0)
""",
    "daemon": """
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.1)
        open(world["folder"] + "/daemon", "w")
    os._exit(0)
escaped_if(True)
""",
    "execute": """
os.execv("/bin/echo", ["echo", "ESCAPED"])
""",
    "execute_self": "os.execv('/proc/self/exe', ['python', '-c', 'print(\"ESCAPED\")'])",
    "subprocess": "import subprocess; escaped_if(subprocess.run(['/bin/true']).returncode == 0)",
    "spawn": "escaped_if(os.posix_spawn('/bin/true', ['true'], {}) > 0)",
    "native_thread": """
import _thread, time
done = []
_thread.start_new_thread(done.append, (1,))
time.sleep(0.05)
escaped_if(done)
""",
    "signal_parent": "os.kill(os.getppid(), 0); escaped_if(True)",
    "signal_trainer": "os.kill(world['pid'], 0); escaped_if(True)",
    "kill_canary": "os.kill(world['canary'], 9); escaped_if(True)",
    "kill_group": "os.killpg(os.getpgid(world['canary']), 9); escaped_if(True)",
    "kill_everyone": """
import signal
if os.getpid() == 1:
    raise SystemExit("everyone is nobody")
escaped_if(libc.kill(-1, 0) == 0)
""",
    "signal_thread": "escaped_if(syscall(234, 131, world['canary'], world['canary'], 0) == 0)",
    "signal_by_queue": """
info = (ctypes.c_int32 * 32)(0, 0, -1)
escaped_if(syscall(129, 138, world["canary"], 0, info) == 0)
""",
    "signal_by_pidfd": "escaped_if(os.pidfd_open(world['canary']) >= 0)",
    "signal_by_owner": """
import fcntl
fcntl.fcntl(1, fcntl.F_SETOWN, world["canary"]); escaped_if(True)
""",
    "trace_parent": "escaped_if(syscall(101, 117, 0x4206, os.getppid(), 0, 0) == 0)",
    "trace_canary": "escaped_if(syscall(101, 117, 0x4206, world['canary'], 0, 0) == 0)",
    "read_canary_memory": """
buffer = ctypes.create_string_buffer(8)
local = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
remote = (ctypes.c_size_t * 2)(0x400000, 8)
result = syscall(310, 270, world["canary"], local, 1, remote, 1, 0)
escaped_if(result >= 0 or ctypes.get_errno() == 14)
""",
    "become_root": "os.setuid(0); escaped_if(True)",
    "new_namespace": "escaped_if(libc.unshare(0x10000000) == 0)",
    "be_left_alone": "escaped_if(libc.prctl(1, 0, 0, 0, 0) == 0)",
    "raise_limits": """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2); escaped_if(True)
""",
    "limit_canary": """
import resource
resource.prlimit(world["canary"], resource.RLIMIT_CPU, (1, 1)); escaped_if(True)
""",
    "slow_down_canary": "os.setpriority(os.PRIO_PROCESS, world['canary'], 19); escaped_if(True)",
    "foreign_machine": """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
escaped_if(machine == "x86_64" and call() > 0)
""",
    "foreign_numbers": "escaped_if(machine == 'x86_64' and syscall(39 | 0x40000000, 0) > 0)",
}
