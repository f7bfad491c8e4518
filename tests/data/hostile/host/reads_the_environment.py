# tries: to read the training process's environment and secrets
# test: escape
# expect: pass

import glob
import json
import os

target = json.loads(input())
done = [name for name in os.environ if "MEGARL" in name or "TOKEN" in name or "KEY" in name]
for path in [
    *glob.glob("/proc/*/environ"),
    f"/proc/{target['pid']}/environ",
    f"/proc/{target['pid']}/cmdline",
]:
    try:
        if target["secret"].encode() in open(path, "rb").read() or path.startswith(f"/proc/{target['pid']}/"):
            done.append(path)
    except OSError:
        pass
print(f"escaped: {done}" if done else "contained")
