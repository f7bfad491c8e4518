"""The system calls that a program under test is refused, compiled to BPF by libseccomp.

An allow list would tie us to every libc and language runtime. Namespaces or Landlock do the confining; this
closes what they leave open: debugging interfaces, kernel features with a history, memory that no limit
counts, sockets. The refusal is an error number, so that programs which merely probe for a feature go on.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import tempfile
from functools import cache

from megarl.rewards.execution.limits import SandboxFailure

# Observing or steering other processes.
PROCESSES = (
    "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_getfd "
    "migrate_pages move_pages"
)
# Large or privileged parts of the kernel that no unit test needs.
KERNEL = (
    "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key "
    "request_key mount umount2 pivot_root chroot setns unshare open_tree move_mount fsopen fsconfig fsmount "
    "fspick mount_setattr open_by_handle_at name_to_handle_at personality acct quotactl quotactl_fd syslog "
    "reboot swapon swapoff kexec_load kexec_file_load init_module finit_module delete_module iopl ioperm "
    "settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname vhangup lookup_dcookie "
    "fanotify_init uselib modify_ldt vmsplice"
)
# Memory outside every process's count.
HIDDEN_MEMORY = "memfd_create memfd_secret shmget shmat semget msgget mq_open"
# Only where the program runs as the user who trains: what neither Landlock nor ownership keeps from it.
SAME_USER = (
    "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal setpriority ioprio_set "
    "sched_setaffinity sched_setattr sched_setparam sched_setscheduler "
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat "
    "setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat file_setattr"
)

CLONE_NEW = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
ACT_ALLOW, ACT_KILL_PROCESS, ACT_ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ATTRIBUTE_BAD_ARCHITECTURE = 2
NOT_EQUAL, MASKED_EQUAL = 1, 7


class _Condition(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


@cache
def program(*, own_namespaces: bool, own_user: bool) -> bytes:
    """Return the filter as BPF instructions.

    own_namespaces: the program sees no process, network or file but its own. own_user: its user owns nothing else.
    Raises SandboxFailure where libseccomp is missing or refuses.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        raise SandboxFailure(
            "libseccomp.so.2 is missing (Debian, Ubuntu: apt-get install libseccomp2)"
        ) from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ACT_ALLOW)))
    if not context:
        raise SandboxFailure("libseccomp does not know this machine's architecture")

    def refuse(name: str, *, error: int = errno.EPERM, condition: _Condition | None = None) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return  # newer than this libseccomp, or not on this architecture
        action, count = ctypes.c_uint32(ACT_ERRNO | error), ctypes.c_uint(bool(condition))
        conditions = (_Condition * 1)(condition) if condition else None
        if result := library.seccomp_rule_add_array(context, action, number, count, conditions):
            raise SandboxFailure(f"libseccomp refuses a rule for {name} (error {-result})")

    try:
        library.seccomp_attr_set(context, ATTRIBUTE_BAD_ARCHITECTURE, ctypes.c_uint32(ACT_KILL_PROCESS))
        names = f"{PROCESSES} {KERNEL} {HIDDEN_MEMORY} {'' if own_namespaces or own_user else SAME_USER}"
        for name in names.split():
            refuse(name)
        for flag in CLONE_NEW:
            refuse("clone", condition=_Condition(0, MASKED_EQUAL, flag, flag))
        refuse("clone3", error=errno.ENOSYS)  # its flags lie in memory; libc falls back to clone
        refuse("prlimit64", condition=_Condition(0, NOT_EQUAL, 0, 0))
        local = _Condition(0, NOT_EQUAL, socket.AF_UNIX, 0)  # AF_VSOCK, for one, knows no namespaces
        refuse("socket", condition=local if own_namespaces else None)
        with tempfile.TemporaryFile() as file:
            if library.seccomp_export_bpf(context, file.fileno()):
                raise SandboxFailure("libseccomp could not compile the filter")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
