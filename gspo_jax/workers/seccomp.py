"""The seccomp filter of the sandbox: system calls that programs may not make.

Classic BPF, as `bwrap --seccomp` takes it (Linux,
Documentation/userspace-api/seccomp_filter.rst). The filter refuses calls that
could gain privileges (namespaces, mounts, BPF, keys), calls that allocate
memory outside of any limit (System V), and the start of a second process, so
that the limits of one process hold for the whole program.

It refuses sockets of every family: some families, such as AF_VSOCK, are not in
a network namespace and reach the host. The one exception is a pair of AF_UNIX
sockets, which asyncio needs. Each of a pair reaches only the other: it gets no
name (bind) and cannot write to a name (connect, sendto with an address).

No memory limit counts the kernel's data of pairs and pipes. Their buffers
cannot be enlarged (setsockopt, F_SETPIPE_SZ), and sockets cannot be sent
through a pair (sendmsg), so 64 open files hold 13 MiB.
"""

import platform
import struct

from gspo_jax.runtime import errors

# Call numbers on x86_64 (asm/unistd_64.h) and aarch64 (asm-generic/unistd.h);
# None where the call does not exist.
REFUSED = {
  "fork": (57, None),
  "vfork": (58, None),
  "ptrace": (101, 117),
  "process_vm_readv": (310, 270),
  "process_vm_writev": (311, 271),
  "unshare": (272, 97),
  "setns": (308, 268),
  "pivot_root": (155, 41),
  "chroot": (161, 51),
  "mount": (165, 40),
  "umount2": (166, 39),
  "open_tree": (428, 428),
  "move_mount": (429, 429),
  "fsopen": (430, 430),
  "fsconfig": (431, 431),
  "fsmount": (432, 432),
  "fspick": (433, 433),
  "mount_setattr": (442, 442),
  "open_by_handle_at": (304, 265),
  "bpf": (321, 280),
  "perf_event_open": (298, 241),
  "userfaultfd": (323, 282),
  "io_uring_setup": (425, 425),
  "io_uring_enter": (426, 426),
  "io_uring_register": (427, 427),
  "add_key": (248, 217),
  "request_key": (249, 218),
  "keyctl": (250, 219),
  "msgget": (68, 186),
  "semget": (64, 190),
  "shmget": (29, 194),
  "shmat": (30, 196),
  "socket": (41, 198),
  "bind": (49, 200),
  "connect": (42, 203),
  "setsockopt": (54, 208),
  "sendmsg": (46, 211),
  "sendmmsg": (307, 269),
}
_SOCKETPAIR, _AF_UNIX = (53, 199), 1
_SENDTO, _FCNTL, _F_SETPIPE_SZ = (44, 206), (72, 25), 1031
_CLONE, _CLONE3 = (56, 220), 435
# AUDIT_ARCH_* of linux/audit.h.
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# linux/sched.h: CLONE_THREAD, and all of CLONE_NEW*.
_THREAD, _NEW = 0x00010000, 0x7E020000
_X32 = 0x40000000
# linux/seccomp.h, with EPERM and ENOSYS.
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
# linux/bpf_common.h: load a word, return, mask, and jumps.
_LOAD, _RETURN, _AND, _EQUAL, _ABOVE = 0x20, 0x06, 0x54, 0x15, 0x35
# Offsets in struct seccomp_data: number, machine, low halves of arguments.
_NUMBER, _MACHINE = 0, 4
_FIRST, _SECOND, _SIXTH = 16, 24, 56


def program(machine: str | None = None) -> bytes:
  """The filter's BPF program for a machine, by default this one."""
  machine = machine or platform.machine()
  if machine not in _MACHINES:
    raise errors.UserError(
      "reward 'code' can confine programs on "
      f"{' and '.join(_MACHINES)} only, and this machine is {machine!r}"
    )
  column = list(_MACHINES).index(machine)
  steps = [
    (_LOAD, 0, 0, _MACHINE),
    (_EQUAL, 1, 0, _MACHINES[machine]),
    (_RETURN, 0, 0, _KILL),
    (_LOAD, 0, 0, _NUMBER),
  ]
  if machine == "x86_64":
    steps += [(_ABOVE, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
  for numbers in REFUSED.values():
    if numbers[column] is not None:
      steps += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _EPERM)]
  for numbers, argument, value, equal, other in (
    (_SOCKETPAIR, _FIRST, _AF_UNIX, _ALLOW, _EPERM),
    (_SENDTO, _SIXTH, 0, _ALLOW, _EPERM),  # length of the address
    (_FCNTL, _SECOND, _F_SETPIPE_SZ, _EPERM, _ALLOW),
  ):
    steps += [
      (_EQUAL, 0, 4, numbers[column]),
      (_LOAD, 0, 0, argument),
      (_EQUAL, 1, 0, value),
      (_RETURN, 0, 0, other),
      (_RETURN, 0, 0, equal),
    ]
  # The flags of clone3 are in memory, which a filter cannot read. With ENOSYS
  # the C library falls back to clone.
  steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
  steps += [
    (_EQUAL, 0, 4, _CLONE[column]),
    (_LOAD, 0, 0, _FIRST),
    (_AND, 0, 0, _THREAD | _NEW),
    (_EQUAL, 1, 0, _THREAD),
    (_RETURN, 0, 0, _EPERM),
    (_RETURN, 0, 0, _ALLOW),
  ]
  return b"".join(struct.pack("<HBBI", *step) for step in steps)
