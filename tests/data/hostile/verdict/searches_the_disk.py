# tries: to read the expected answer from the test's files
# test: needle
# expect: fail

import os
import re
import time

found, end = set(), time.monotonic() + 0.3
for top in (".", "/megarl", "/tmp", "/var", "/home", "/root", "/dev/shm", "/proc", "/etc", "/"):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if os.path.isfile(path) and os.path.getsize(path) < 1 << 20:
                    found.update(re.findall(rb"needle-[0-9a-f]{16}", open(path, "rb").read()))
            except (OSError, ValueError):
                pass
            if time.monotonic() > end:
                break
        if time.monotonic() > end:
            break
print(*(text.decode() for text in found))
