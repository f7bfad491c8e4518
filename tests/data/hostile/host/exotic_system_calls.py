# tries: to use parts of the kernel with a history
# test: escape
# expect: pass

import ctypes
import json
import platform

json.loads(input())
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
calls = {
    "bpf": 321 if x86 else 280,
    "perf_event_open": 298 if x86 else 241,
    "userfaultfd": 323 if x86 else 282,
    "io_uring_setup": 425,
    "keyctl": 250 if x86 else 219,
    "add_key": 248 if x86 else 217,
    "open_by_handle_at": 304 if x86 else 265,
    "memfd_secret": 447,
}
block = ctypes.create_string_buffer(256)
done = [name for name, number in calls.items() if libc.syscall(number, 0, block, 128, 0, 0) >= 0]
refused = [
    name
    for name, number in calls.items()
    if libc.syscall(number, 0, block, 128, 0, 0) < 0 and ctypes.get_errno() not in (1, 38)
]
print(f"escaped: {done} reached the kernel: {refused}" if done or refused else "contained")
