# tries: to stop and never be continued
# test: sum
# expect: fail
# reason: time on the clock|PermissionError

import os
import signal

print(8, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
