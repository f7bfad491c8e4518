# tries: to run other programs of the machine
# test: escape
# expect: pass

import json
import subprocess

json.loads(input())
done = []
for command in (
    ["/bin/sh", "-c", "echo hi"],
    ["curl", "--version"],
    ["bash", "-c", "id"],
    ["python3", "-c", "1"],
    ["nvidia-smi"],
):
    try:
        if subprocess.run(command, capture_output=True, timeout=1).returncode == 0:
            done.append(command[0])
    except (OSError, subprocess.SubprocessError):
        pass
print(f"escaped: {done}" if done else "contained")
