"""Give up every right a program does not need, in the process that is about to become that program.

`apply(rules)` is called between fork and the first byte of untrusted code. The rules are decided outside (see
`backends.py`); here they are only carried out. Whatever cannot be carried out raises OSError, and then the program
is not run.
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG, SIGKILL = 1, 9
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3, LAST_CAPABILITY = 0x20080522, 63

# Landlock (linux/landlock.h): system calls, and the file rights by the ABI version that brought them.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
BASE_RIGHTS, REFER, TRUNCATE, IOCTL_DEV = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
READ_RIGHTS = EXECUTE | READ_FILE | READ_DIR
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

libc = ctypes.CDLL(None, use_errno=True)


def apply(rules: dict[str, Any]) -> None:
    """Give up every right but these.

    limits: {name of an RLIMIT: value or [soft, hard]}; uid: number or None (stay, without capabilities);
    landlock: {"read": paths, "write": paths} or None; seccomp: a BPF program or None.
    """
    for name, value in rules["limits"].items():
        limit = (value[0], value[1]) if isinstance(value, list) else (value, value)
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), limit)
    if rules["uid"] is not None:
        os.setgroups([])
        os.setresgid(rules["uid"], rules["uid"], rules["uid"])
        os.setresuid(rules["uid"], rules["uid"], rules["uid"])
    else:
        drop_capabilities()
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    prctl(PR_SET_DUMPABLE, 1)  # the supervisor is not, and a change of user clears it; /dev/stdin needs it
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if rules["landlock"]:
        restrict_files(rules["landlock"]["read"], rules["landlock"]["write"])
    if rules["seccomp"]:
        filter_system_calls(rules["seccomp"])


def prctl(option: int, argument: int, pointer: Any = 0) -> None:
    if libc.prctl(option, ctypes.c_ulong(argument), pointer, 0, 0):
        raise os_error(f"prctl({option})")


def os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def drop_capabilities() -> None:
    """Take the power from a root that cannot become another user: it keeps the number 0."""
    for capability in range(LAST_CAPABILITY + 1):
        # What is unknown or not ours to drop is refused, and that is no harm.
        libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    if libc.capset(header, bytes(24)):
        raise os_error("capset")


def filter_system_calls(program: bytes) -> None:
    """Install a BPF program of 8-byte instructions (`struct sock_fprog`)."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header))


def restrict_files(read: list[str], write: list[str]) -> None:
    """Close the file system by Landlock, but for reading and executing below `read`, and anything below `write`."""
    abi = landlock_abi()
    rights = BASE_RIGHTS | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0)
    rights |= IOCTL_DEV if abi >= 5 else 0
    attributes = [rights]
    if abi >= 4:
        attributes.append(3)  # bind and connect of TCP
    if abi >= 6:
        attributes.append(3)  # abstract sockets and signals stay inside
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, packed, ctypes.c_size_t(len(packed)), ctypes.c_uint(0))
    if ruleset < 0:
        raise os_error("landlock_create_ruleset")
    for paths, allowed in ((read, READ_RIGHTS), (write, rights)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    if libc.syscall(LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)):
        raise os_error("landlock_restrict_self")
    os.close(ruleset)


def landlock_abi() -> int:
    """Return the kernel's Landlock version, 0 where it has none or has it switched off."""
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(0, int(version))


def _allow(ruleset: int, path: str, rights: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            rights &= FILE_RIGHTS
        rule = struct.pack("=Qi", rights, handle)
        if libc.syscall(LANDLOCK_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0)):
            raise os_error(f"landlock_add_rule {path}")
    finally:
        os.close(handle)
