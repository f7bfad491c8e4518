# tries: to leave daemons behind that ignore signals, restart each other and hold the output open
# test: sum
# expect: pass

import os
import signal
import time

for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
if os.fork() == 0:
    os.setsid()
    while True:
        if os.fork():
            os._exit(0)
        time.sleep(0.01)
print(sum(map(int, input().split())))
