"""Programs that talk to others. One that succeeds prints ESCAPED."""

NETWORK = {
    "connect_inet": """
import socket
socket.create_connection(("127.0.0.1", world["port"]), 1); escaped_if(True)
""",
    "connect_unix": """
import socket
socket.socket(socket.AF_UNIX).connect(world["unix"]); escaped_if(True)
""",
    "connect_abstract": """
import socket
socket.socket(socket.AF_UNIX).connect("\\0" + world["abstract"]); escaped_if(True)
""",
    "send_datagram": """
import socket
socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", world["port"]))
escaped_if(True)
""",
    "listen": """
import socket
socket.create_server(("127.0.0.1", 0)); escaped_if(True)
""",
    "netlink": "import socket; escaped_if(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))",
    "socket_pair": "import socket; escaped_if(socket.socketpair())",
    "socket_by_number": "escaped_if(syscall(41, 198, 2, 1, 0) >= 0)",
    "io_uring": "escaped_if(syscall(425, 425, 4, (ctypes.c_uint32 * 64)()) >= 0)",
    "shared_memory": "escaped_if(syscall(29, 194, 0, 4096, 0o1600) >= 0)",
    "message_queue": "escaped_if(syscall(68, 186, 0, 0o1600) >= 0)",
    "semaphores": "escaped_if(syscall(64, 190, 0, 1, 0o1600) >= 0)",
    "keyring": "escaped_if(syscall(250, 219, 0, -3, 1) >= 0)",
    "kernel_program": """
attributes = (ctypes.c_uint32 * 32)(1, 4, 4, 1)
escaped_if(syscall(321, 280, 0, attributes, 64) >= 0)
""",
    "fault_handler": "escaped_if(syscall(323, 282, 1) >= 0)",
    "performance_events": """
attributes = (ctypes.c_uint32 * 32)(1, 128)
escaped_if(syscall(298, 241, attributes, 0, -1, -1, 0) >= 0)
""",
}
