# tries: to leave dead children that nobody waited for
# test: sum
# expect: pass

import os
import time

for _ in range(8):
    if os.fork() == 0:
        os._exit(0)
time.sleep(0.05)
print(sum(map(int, input().split())))
