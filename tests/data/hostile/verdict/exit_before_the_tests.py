# tries: to end with code 0 before anything is checked
# test: add
# expect: fail
# reason: ended before the function returned

import sys

sys.exit(0)
