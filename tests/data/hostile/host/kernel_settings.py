# tries: to change kernel settings, control groups and its own standing with the memory killer
# test: escape
# expect: pass

import glob
import json

json.loads(input())
done = []
paths = [
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sysrq-trigger",
    "/proc/sys/vm/drop_caches",
]
paths += ["/sys/kernel/uevent_helper", "/sys/power/state"]
paths += glob.glob("/sys/fs/cgroup/**/cgroup.procs", recursive=True)[:20]
for path in paths:
    try:
        with open(path, "w") as file:
            file.write("1")
        done.append(path)
    except OSError:
        pass
for path in ("/proc/self/oom_score_adj", "/proc/1/oom_score_adj", "/proc/2/oom_score_adj"):
    try:
        with open(path, "w") as file:
            file.write("-1000")
        done.append(path)
    except OSError:
        pass
print(f"escaped: {done}" if done else "contained")
