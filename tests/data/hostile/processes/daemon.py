# tries: to leave a daemon behind
# test: sum
# expect: pass

import os
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        time.sleep(1_000_000)
    os._exit(0)
print(sum(map(int, input().split())))
