# tries: to signal the training process by its number
# test: escape
# expect: pass

import json
import os
import signal

pid = json.loads(input())["pid"]
done = []
for number in (0, signal.SIGTERM, signal.SIGKILL):
    try:
        os.kill(pid, number)
        done.append(number)
    except OSError:
        pass
try:
    os.killpg(pid, signal.SIGTERM)
    done.append("group")
except OSError:
    pass
print(f"escaped: {done}" if done else "contained")
