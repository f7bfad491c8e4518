# tries: to wait for ever
# test: sum
# expect: fail
# reason: time on the clock

import time

print(7, flush=True)
time.sleep(1_000_000)
