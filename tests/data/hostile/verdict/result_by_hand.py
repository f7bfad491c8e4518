# tries: to write several candidates into the result channel
# test: needle_call
# expect: fail
# reason: no JSON

import os


def find():
    os.write(3, b'["needle-0000000000000000"] true null "expected" ')
    os._exit(0)
