# tries: to write a verdict of its own into every descriptor, its supervisor's too
# test: needle
# expect: fail

import json
import os
import struct

report = {
    "ended": "exit",
    "code": 0,
    "verdict": "pass",
    "score": 1.0,
    "passed": 2,
    "total": 2,
    "cpu_seconds": 0.0,
}
body = json.dumps(report).encode()
frame = struct.pack("!I", len(body)) + body
for number in range(2, 1024):
    try:
        os.write(number, frame)
    except OSError:
        pass
for pid in (1, 2, 3, os.getppid()):
    for number in range(300):
        try:
            with open(f"/proc/{pid}/fd/{number}", "wb", 0) as pipe:
                pipe.write(frame)
        except OSError:
            pass
