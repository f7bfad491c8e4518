# tries: to mount, change the root folder, and enter other namespaces
# test: escape
# expect: pass

import ctypes
import json
import os

json.loads(input())
libc = ctypes.CDLL(None, use_errno=True)
done = []
os.makedirs("place", exist_ok=True)
if libc.mount(b"none", b"place", b"tmpfs", 0, None) == 0:
    done.append("mount")
if libc.mount(None, b"/", None, 32 | 4096, None) == 0:
    done.append("remount")
if libc.umount2(b"/megarl/work", 2) == 0:
    done.append("umount")
if libc.chroot(b"place") == 0:
    done.append("chroot")
if libc.syscall(155, b"place", b"place") == 0:
    done.append("pivot_root")
for name in ("mnt", "net", "pid", "user"):
    for pid in (1, os.getppid()):
        try:
            handle = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        except OSError:
            continue
        if libc.setns(handle, 0) == 0:
            done.append(("setns", name))
print(f"escaped: {done}" if done else "contained")
