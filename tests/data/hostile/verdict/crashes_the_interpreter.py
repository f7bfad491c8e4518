# tries: to crash with a wild pointer
# test: sum
# expect: fail
# reason: SIGSEGV

import ctypes

print(7, flush=True)
ctypes.string_at(1)
