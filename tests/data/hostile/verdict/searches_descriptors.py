# tries: to read the expected answer from descriptors it inherited
# test: needle_call
# expect: fail
# reason: expected

import os
import re


def find():
    found = set()
    for number in range(3, 1024):
        try:
            os.set_blocking(number, False)
            found.update(re.findall(rb"needle-[0-9a-f]{16}", os.read(number, 1 << 20)))
        except OSError:
            pass
    for link in ("/proc/self/fd", "/proc/1/fd", f"/proc/{os.getppid()}/fd"):
        try:
            for name in os.listdir(link):
                handle = os.open(os.path.join(link, name), os.O_RDONLY | os.O_NONBLOCK)
                found.update(re.findall(rb"needle-[0-9a-f]{16}", os.read(handle, 1 << 20)))
        except OSError:
            pass
    return " ".join(text.decode() for text in found)
