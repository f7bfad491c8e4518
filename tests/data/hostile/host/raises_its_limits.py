# tries: to raise its own limits and lower those of others
# test: escape
# expect: pass

import json
import os
import resource

target = json.loads(input())
done = []
for name in ("CPU", "DATA", "FSIZE", "NOFILE", "STACK", "CORE"):
    limit = getattr(resource, f"RLIMIT_{name}")
    try:
        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        done.append(name)
    except (OSError, ValueError):
        pass
for pid in (os.getppid(), 1, target["pid"]):
    try:
        resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))
        done.append(pid)
    except OSError:
        pass
try:
    os.nice(-5)
    done.append("nice")
except OSError:
    pass
print(f"escaped: {done}" if done else "contained")
