# tries: to keep a thread alive that answers later
# test: add
# expect: fail
# reason: expected '7'

import threading
import time


def add(a, b):
    threading.Thread(target=lambda: (time.sleep(0.2), open(3, "w").write("7")), daemon=True).start()
    return 8
