# tries: to fork without end
# test: sum
# expect: fail
# reason: time|processes|brought

import os

while True:
    try:
        os.fork()
    except OSError:
        pass
