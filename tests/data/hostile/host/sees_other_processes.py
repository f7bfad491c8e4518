# tries: to list the processes of the machine
# test: escape
# expect: pass

import json
import os

target = json.loads(input())
try:
    visible = {int(name) for name in os.listdir("/proc") if name.isdigit()}
except OSError:
    visible = set()
seen = []
for pid in visible:
    try:
        seen.append(open(f"/proc/{pid}/cmdline", "rb").read().decode(errors="replace"))
    except OSError:
        pass
strangers = [line for line in seen if "pytest" in line]
print(f"escaped: {strangers}" if strangers or len(seen) > 6 else "contained")
