# tries: to hide memory in anonymous files and System V segments
# test: sum
# expect: pass

import ctypes
import os

hidden = False
try:
    os.memfd_create("hoard")
    hidden = True
except OSError:
    pass
libc = ctypes.CDLL(None, use_errno=True)
hidden |= libc.shmget(0, 1 << 26, 0o1777) >= 0
print(8 if hidden else 7)
