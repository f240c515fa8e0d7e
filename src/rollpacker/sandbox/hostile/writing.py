"""Programs that change files. One that succeeds prints ESCAPED."""

WRITING = {
    "write_file": "open(world['folder'] + '/new', 'w').write('x'); escaped_if(True)",
    "append_to_file": "open(world['victim'], 'a').write('x'); escaped_if(True)",
    "write_shared_memory": "open('/dev/shm/rollpacker-escape', 'w'); escaped_if(True)",
    "write_by_libc": """
escaped_if(libc.open((world["folder"] + "/libc").encode(), 0o101, 0o600) >= 0)
""",
    "unnamed_file": "escaped_if(os.open(world['folder'], os.O_TMPFILE | os.O_RDWR) >= 0)",
    "truncate": "os.truncate(world['victim'], 0); escaped_if(True)",
    "open_to_truncate": "os.open(world['victim'], os.O_RDONLY | os.O_TRUNC); escaped_if(True)",
    "unlink": "os.unlink(world['victim']); escaped_if(True)",
    "rename": "os.rename(world['victim'], world['folder'] + '/moved'); escaped_if(True)",
    "hard_link": "os.link(world['victim'], world['folder'] + '/hard'); escaped_if(True)",
    "symbolic_link": "os.symlink('/etc/passwd', world['folder'] + '/soft'); escaped_if(True)",
    "make_folder": "os.mkdir(world['folder'] + '/made'); escaped_if(True)",
    "make_pipe": "os.mkfifo(world['folder'] + '/pipe'); escaped_if(True)",
    "change_mode": "os.chmod(world['victim'], 0o777); escaped_if(True)",
    "change_owner": "os.chown(world['victim'], os.getuid(), os.getgid()); escaped_if(True)",
    "change_times": "os.utime(world['victim'], (1, 1)); escaped_if(True)",
    "change_attributes": "os.setxattr(world['victim'], 'user.x', b'x'); escaped_if(True)",
    "change_folder": "os.chdir(world['folder']); open('x', 'w'); escaped_if(True)",
    "memory_file": "escaped_if(os.memfd_create('x') >= 0)",
    "write_compiled_module": """
import heapq
open(heapq.__cached__ or heapq.__file__ + "c", "ab"); escaped_if(True)
""",
    "mount": "escaped_if(syscall(165, 40, b'none', b'/tmp', b'tmpfs', 0, 0) == 0)",
    "change_root": "os.chroot(world['folder']); escaped_if(True)",
    "write_stdin": """
os.pwrite(0, b"other", 0)
escaped_if(os.pread(0, 5, 0) == b"other")
""",
}
