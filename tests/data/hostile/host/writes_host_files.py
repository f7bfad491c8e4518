# tries: to change files of the host in every way there is
# test: escape
# expect: pass

import json
import os
import sys

target = json.loads(input())
sentinel = target["sentinel"]
done = []
attempts = {
    "write": lambda: open(sentinel, "w").close(),
    "append": lambda: open(sentinel, "a").close(),
    "truncate": lambda: os.truncate(sentinel, 0),
    "remove": lambda: os.remove(sentinel),
    "rename": lambda: os.rename(sentinel, sentinel + ".gone"),
    "chmod": lambda: os.chmod(sentinel, 0o777),
    "chown": lambda: os.chown(sentinel, 65534, 65534),
    "utime": lambda: os.utime(sentinel, (0, 0)),
    "setxattr": lambda: os.setxattr(sentinel, "user.mark", b"x"),
    "neighbour": lambda: open(os.path.join(os.path.dirname(sentinel), "new"), "w").close(),
    "etc": lambda: open("/etc/megarl-was-here", "w").close(),
    "usr": lambda: open("/usr/lib/megarl-was-here", "w").close(),
    "root": lambda: open("/megarl-was-here", "w").close(),
    "library": lambda: open(os.path.join(os.path.dirname(os.__file__), "sitecustomize.py"), "w").close(),
    "interpreter": lambda: open(sys.executable, "ab").close(),
}
for name, attempt in attempts.items():
    try:
        attempt()
        done.append(name)
    except OSError:
        pass
print(f"escaped: {done}" if done else "contained")
