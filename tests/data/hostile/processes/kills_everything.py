# tries: to kill its parents and whatever else it can reach
# test: sum
# expect: fail

import os
import signal

for pid in (os.getppid(), 1, 2, 3, -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print(8)
