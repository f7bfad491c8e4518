# tries: to start threads without end
# test: sum
# expect: fail
# reason: can't start new thread|processes|time|memory

import threading
import time

while True:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
