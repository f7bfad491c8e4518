# tries: to replace every function of the modules around it
# test: needle_call
# expect: fail
# reason: expected

import json
import sys


def find():
    for module in list(sys.modules.values()):
        for name in dir(module):
            if any(
                word in name.lower()
                for word in ("compar", "check", "judge", "verify", "expect", "_equal", "difference")
            ):
                try:
                    setattr(module, name, lambda *args, **kwargs: True)
                except (AttributeError, TypeError):
                    pass
    json.dumps = lambda *args, **kwargs: "true"
    return
