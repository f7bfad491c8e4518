# tries: to find the expected answer in its own and its parents' raw memory
# test: needle
# expect: fail

import os
import re

found = set()
for pid in ("self", os.getppid(), 1, 2, 3):
    try:
        regions = [line.split() for line in open(f"/proc/{pid}/maps")]
        memory = open(f"/proc/{pid}/mem", "rb", 0)
    except OSError:
        continue
    for region in regions:
        begin, end = (int(part, 16) for part in region[0].split("-"))
        if region[1].startswith("rw") and end - begin < 1 << 26:
            try:
                memory.seek(begin)
                found.update(re.findall(rb"needle-[0-9a-f]{16}", memory.read(end - begin)))
            except (OSError, ValueError):
                pass
print(*(text.decode() for text in found))
