"""The seccomp filter, interpreted in Python: which calls it allows."""

import struct

import pytest

from gspo_jax.workers import seccomp

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
NO_PERMISSION, UNKNOWN = 0x00050000 | 1, 0x00050000 | 38
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386 = 0x40000003
# Of programs that do nothing but compute, on x86_64 and aarch64: read, write,
# mmap, munmap, brk, futex, exit_group, execve, getrandom, rt_sigaction, poll.
HARMLESS = {
  "x86_64": (0, 1, 9, 11, 12, 202, 231, 59, 318, 13, 7),
  "aarch64": (63, 64, 222, 215, 214, 98, 94, 221, 278, 134, 73),
}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
SENDTO, FCNTL = {"x86_64": 44, "aarch64": 206}, {"x86_64": 72, "aarch64": 25}
# What the C library asks for: a thread, and fork.
THREAD, FORK = 0x003D0F00, 0x01200011


def filtered(machine, number, *arguments, arch=None):
  """The result of the filter for a call, by the rules of classic BPF."""
  arch = MACHINES[machine] if arch is None else arch
  rest = [0] * (6 - len(arguments))
  data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *rest)
  steps = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
  value, at = 0, 0
  while True:
    code, true, false, k = steps[at]
    at += 1
    if code == 0x20:
      (value,) = struct.unpack_from("<I", data, k)
    elif code == 0x54:
      value &= k
    elif code == 0x15:
      at += true if value == k else false
    elif code == 0x35:
      at += true if value >= k else false
    else:
      assert code == 0x06
      return k


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_are_refused_by_name_and_others_allowed(machine):
  row = list(MACHINES).index(machine)
  refused = {numbers[row] for numbers in seccomp.REFUSED.values()} - {None}
  by_argument = {CLONE[machine], SOCKETPAIR[machine], 435}
  for number in set(range(600)) - by_argument:
    expected = NO_PERMISSION if number in refused else ALLOWED
    assert filtered(machine, number) == expected
  assert not refused & set(HARMLESS[machine])


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_start_and_processes_do_not(machine):
  clone = CLONE[machine]
  assert filtered(machine, clone, THREAD) == ALLOWED
  assert filtered(machine, clone, FORK) == NO_PERMISSION
  assert filtered(machine, clone, 0x4111) == NO_PERMISSION  # vfork
  for bit in (17, *range(25, 31)):
    assert filtered(machine, clone, THREAD | 1 << bit) == NO_PERMISSION
  assert filtered(machine, 435) == UNKNOWN  # clone3


@pytest.mark.parametrize("machine", MACHINES)
def test_pairs_of_unix_sockets_are_the_only_sockets(machine):
  for family in range(64):
    expected = ALLOWED if family == 1 else NO_PERMISSION
    assert filtered(machine, SOCKETPAIR[machine], family) == expected
  assert {"socket", "bind", "connect"} <= set(seccomp.REFUSED)


@pytest.mark.parametrize("machine", MACHINES)
def test_no_data_to_an_address_and_no_larger_pipes(machine):
  sendto, fcntl = SENDTO[machine], FCNTL[machine]
  assert filtered(machine, sendto, 3, 1, 1, 0, 0, 0) == ALLOWED
  assert filtered(machine, sendto, 3, 1, 1, 0, 1 << 40, 9) == NO_PERMISSION
  for command in range(2000):
    expected = NO_PERMISSION if command == 1031 else ALLOWED
    assert filtered(machine, fcntl, 3, command, 1 << 20) == expected


def test_calls_of_other_machines_end_the_program():
  for number in (0, 20, 57):
    assert filtered("x86_64", number, arch=I386) == KILLED
    assert filtered("aarch64", number, arch=MACHINES["x86_64"]) == KILLED
    assert filtered("x86_64", 0x40000000 + number) == KILLED  # x32
  assert filtered("x86_64", 0xFFFFFFFF) == KILLED
