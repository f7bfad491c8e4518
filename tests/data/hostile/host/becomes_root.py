# tries: to gain privileges by set-user-id programs, user changes and namespaces
# test: escape
# expect: pass

import ctypes
import json
import os

json.loads(input())
libc = ctypes.CDLL(None, use_errno=True)
done = []
if os.getuid() != 0:
    for change in (
        lambda: os.setuid(0),
        lambda: os.setresuid(0, 0, 0),
        lambda: os.setgroups([0]),
        lambda: os.setgid(0),
    ):
        try:
            change()
            done.append("user")
        except OSError:
            pass
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):
    if libc.unshare(flag) == 0:
        done.append(("unshare", hex(flag)))
try:
    done += [
        line for line in open("/proc/self/status") if line.startswith("CapEff") and int(line.split()[1], 16)
    ]
except OSError:
    pass
for program in ("/usr/bin/su", "/usr/bin/sudo", "/bin/mount", "/usr/bin/newuidmap"):
    if os.access(program, os.X_OK) and os.spawnv(os.P_WAIT, program, [program, "-c", "true"]) == 0:
        done.append(program)
print(f"escaped: {done}" if done else "contained")
