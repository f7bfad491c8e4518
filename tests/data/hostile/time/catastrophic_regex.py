# tries: to compute in C code that looks at no signal
# test: sum
# expect: fail
# reason: time

import re

print(re.match(r"(a+)+$", "a" * 60 + "!"))
