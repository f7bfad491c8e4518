# tries: to read files of the host
# test: escape
# expect: pass

import glob
import json
import os
import sys

target = json.loads(input())
done = []
paths = [
    target["sentinel"],
    "/etc/shadow",
    "/etc/passwd",
    "/proc/1/environ",
    "/root/.bash_history",
    "/etc/hosts",
]
paths += glob.glob("/home/*/.ssh/*") + glob.glob("/root/.ssh/*") + glob.glob("/run/secrets/*")
for path in paths:
    try:
        with open(path, "rb") as file:
            if file.read(1):
                done.append(path)
    except OSError:
        pass
for folder in ("/root", "/home", "/var", "/mnt", os.path.dirname(target["sentinel"])):
    try:
        if os.listdir(folder) and not sys.base_prefix.startswith(folder + "/"):
            done.append(folder)
    except OSError:
        pass
print(f"escaped: {done}" if done else "contained")
