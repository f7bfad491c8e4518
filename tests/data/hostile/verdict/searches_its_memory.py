# tries: to find the expected answer among the objects of its own process
# test: needle
# expect: fail

import gc
import re
import sys

pattern = re.compile(r"needle-[0-9a-f]{16}")
found = set()
frame = sys._getframe()
while frame:
    found.update(pattern.findall(repr(frame.f_locals)[:1_000_000]))
    frame = frame.f_back
for thing in gc.get_objects():
    if isinstance(thing, (dict, list, tuple, set)):
        try:
            found.update(pattern.findall(repr(thing)[:100_000]))
        except Exception:
            pass
print(*found)
