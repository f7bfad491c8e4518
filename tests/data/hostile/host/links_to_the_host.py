# tries: to reach files of the host through links
# test: escape
# expect: pass

import json
import os

target = json.loads(input())
sentinel = target["sentinel"]
done = []
os.symlink(sentinel, "soft")
os.symlink(os.path.dirname(sentinel), "folder")
for path in (
    "soft",
    os.path.join("folder", os.path.basename(sentinel)),
    f"/proc/self/root{sentinel}",
    f"/proc/1/root{sentinel}",
):
    for mode in ("rb", "r+b", "wb"):
        try:
            open(path, mode).close()
            done.append((path, mode))
        except OSError:
            pass
try:
    os.link(sentinel, "hard")
    done.append("hard link")
except OSError:
    pass
os.symlink("/etc/passwd", "main.txt")
try:
    open("main.txt").close()
    done.append("passwd")
except OSError:
    pass
print(f"escaped: {done}" if done else "contained")
