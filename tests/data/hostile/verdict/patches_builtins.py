# tries: to make every comparison in the process come out true
# test: add
# expect: fail
# reason: exit code 1|expected '7', got '8'

import builtins
import operator

for name in ("all", "any", "isinstance", "bool", "callable", "hasattr"):
    setattr(builtins, name, lambda *_: True)
for name in ("eq", "is_", "contains"):
    setattr(operator, name, lambda *_: True)


def add(a, b):
    return 8
