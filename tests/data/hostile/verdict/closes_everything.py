# tries: to close its descriptors and go on
# test: sum
# expect: fail
# reason: time

import os

os.closerange(0, 1 << 16)
while True:
    pass
