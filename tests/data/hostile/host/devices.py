# tries: to read disks, kernel memory and terminals through device files
# test: escape
# expect: pass

import fcntl
import json
import os
import stat
import termios

json.loads(input())
done = []
for path in (
    "/dev/mem",
    "/dev/kmsg",
    "/dev/vda",
    "/dev/sda",
    "/dev/nvme0n1",
    "/dev/kvm",
    "/dev/fuse",
    "/dev/nvidia0",
    "/dev/tty",
):
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        done.append(path)
    except OSError:
        pass
for kind, number in ((stat.S_IFBLK, os.makedev(254, 0)), (stat.S_IFCHR, os.makedev(1, 1))):
    try:
        os.mknod("device", kind | 0o666, number)
        done.append("mknod")
    except OSError:
        pass
for number in range(3):
    try:
        fcntl.ioctl(number, termios.TIOCSTI, b"x")
        done.append("TIOCSTI")
    except OSError:
        pass
print(f"escaped: {done}" if done else "contained")
