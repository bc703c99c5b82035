"""Hostile responses to `math` and `code`; one pool scores a whole table."""

import json
import os
import platform
import time

import pytest
from processes import commands

from gspo_jax import rewards
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rewards.reward import Response
from gspo_jax.runtime.errors import UserError
from gspo_jax.workers import sandbox_files, seccomp

FAILED = "failed"
MEGABYTE = 1 << 20
# MiB of a program; an odd number, by which the test finds its processes.
MEMORY = 257


def box(text):
  return "\\boxed{" + text + "}"


# To the reference 18.
RIGHT = {
  "an honest response": box("18"),
  "parentheses": box("(" * 8 + "18" + ")" * 8),
  "braces": box("{" * 8 + "18" + "}" * 8),
  "deep braces": box("{" * 40 + "18" + "}" * 40),
  "fractions of fractions": box("\\frac{1}{" * 40 + "18" + "}" * 40),
}
WRONG = {
  "a tower of powers": box("9^{9^{9^{9}}}"),
  "a tower that stands": box("2^{2^{2^{2^{2^{2}}}}}"),
  "a factorial": box("(10^9)!"),
  "factorials of factorials": box("9!!!!!!!"),
  "nested roots": box("\\sqrt{" * 30 + "2" + "}" * 30),
  "a binomial": box("\\binom{10^{9}}{5\\cdot 10^{8}}"),
  "a sum without end": box("\\sum_{n=1}^{10^{12}} \\frac{1}{n}"),
  "an integral": box("\\int_0^{18} e^{x^{x^{x}}} dx"),
  "a large matrix": box(
    "\\begin{pmatrix}" + "\\\\".join(["1&2&3&4"] * 30) + "\\end{pmatrix}"
  ),
  "roots of towers": box("\\sqrt{\\frac{9^{9^{9^9}}}{9}}"),
  "out of the box": "#### 17} so the final answer is $18$. {",
  "out of the box, by a sentence": (
    "#### 17} final answer is $18$. I hope it is correct. {"
  ),
  "a brace too many": "#### 18}",
  "a power of a sum": box("(a+b+c+d+e+f+g)^{400}"),
  "a long equation that ends in it": box("x^{60}-x^{59}+x+18=18"),
  "parentheses 100,000 deep": box("(" * 100_000 + "18" + ")" * 100_000),
  "deep brackets": box("[" * 40 + "17" + "]" * 40),
  "a large power of ten": box("10^{999999999}"),
  "a small power of ten": box("10^{-999999999}"),
  "a number times a large power": box("3\\times 10^{9999999}"),
  "a power modulo": box("7^{10^{30}} \\mod 13"),
  "signs": box("-" * 400 + "18"),
  "bars": box("|+" * 200 + "18"),
  "a megabyte": box("x+" * (MEGABYTE // 2) + "1"),
  "all numbers": box(",".join(map(str, range(100)))),
  "division by zero": box("\\frac{18}{0}"),
  "an exponent": box("1e999999999"),
  "unbalanced": box("\\frac{36}{2"),
  "no box": "18",
  "null bytes": box("18\0"),
  "surrogates": box("\ud800"),
}


def safely(attempt, *errors):
  """A program that prints what is expected iff an attempt is refused."""
  indented = "\n".join("  " + line for line in attempt.split("\n"))
  caught = ", ".join(errors or ("OSError",))
  return f"try:\n{indented}\nexcept ({caught}): print('refused')"


def calls(*numbers, errors=(1,)):
  """A program that prints what is expected iff each call says so."""
  return f"""
import ctypes
c = ctypes.CDLL(None, use_errno=True)
wrong = []
for call in {numbers}:
  done = c.syscall(*map(ctypes.c_long, call))
  if done == 0 and call[0] == {CLONE}:
    c._exit(0)
  if done >= 0 or ctypes.get_errno() not in {errors}:
    wrong.append((call, done, ctypes.get_errno()))
print("refused" if not wrong else wrong)"""


ROW = platform.machine() == "aarch64"
CLONE = (56, 220)[ROW]
# CLONE_NEW* of linux/sched.h: mount, cgroup, uts, ipc, user, pid, net.
NEW = (1 << 17, *(1 << n for n in range(25, 31)))
REFUSED = [row[ROW] for row in seccomp.REFUSED.values() if row[ROW]]
# getpid by the entry of 32-bit programs: code that runs from a page of its own.
INT80 = """
import ctypes, mmap
code = b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3"
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
at = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(ctypes.c_int)(at)()
print("refused")"""

# One test each: no input, "refused" expected. Programs get 1 if the attempt is
# refused and they go on; those that are killed get 0.
PASSING = {
  "an honest response": "print('refused')",
  "a surrogate": "print('refused') # \ud800",
  "a megabyte of comment": "print('refused')\n#" + "x" * MEGABYTE,
  "input that is not there": safely("input()", "EOFError"),
  "network: no socket, of any family": (
    "import socket\nmade = []\nfor family in range(64):\n"
    "  for kind in (1, 2, 3, 5):\n"
    "    try: socket.socket(family, kind); made.append((family, kind))\n"
    "    except PermissionError: pass\n"
    "print('refused' if not made else made)"
  ),
  "network: a name of the host, by a pair": (
    "import socket\nmade = []\nkind = socket.SOCK_DGRAM\n"
    "one, other = socket.socketpair(socket.AF_UNIX, kind)\n"
    "send = lambda name: one.sendto(b'x', name)\n"
    "for call in (one.bind, one.connect, send):\n"
    "  try: call(chr(0) + 'gspo'); made.append(call)\n"
    "  except PermissionError: pass\n"
    "one.send(b'refused')\nprint(other.recv(9).decode() if not made else made)"
  ),
  "an event loop, which has a pair of sockets": (
    "import asyncio\nasyncio.run(asyncio.sleep(0.01))\nprint('refused')"
  ),
  "files: all that there are": (
    "import os, re\nlibrary = os.path.dirname(os.__file__) + '/'\n"
    "own = ['/program.py', 'PYTHON', '/etc/ld.so.cache']\n"
    "own += ['/dev/null', '/dev/stdin', '/dev/urandom']\n"
    "other = [os.path.join(folder, name)\n"
    "  for folder, _, names in os.walk('/') for name in names]\n"
    "other = [path for path in other if '-packages/' in path or not (\n"
    "  path.startswith((library, '/usr/share/zoneinfo/')) or path in own\n"
    "  or re.search(r'[.]so[.0-9]*$', path))]\n"
    "print('refused' if not other else other)"
  ),
  "files: the null device": (
    "import os, sys\nsys.stderr = open(os.devnull, 'w')\n"
    "print('x', file=sys.stderr)\nprint(open(os.devnull).read() + 'refused')"
  ),
  "files: the random device": (
    "one = open('/dev/urandom', 'rb').read(9)\n"
    "print('refused' if len(one) == 9 else one)"
  ),
  "modules that need libraries": (
    "import bz2, ctypes, decimal, lzma, sqlite3, ssl, zlib\n"
    "sqlite3.connect(':memory:').execute('select 1')\nprint('refused')"
  ),
  "files: writing anywhere": (
    "opened = []\n"
    "for path in ('/x', '/tmp/x', '/usr/x', 'HOME/x', 'x', '/program.py'):\n"
    "  try: opened.append(open(path, 'w'))\n"
    "  except OSError: pass\n"
    "print('refused' if not opened else opened)"
  ),
  "files: in memory": (
    "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    + safely("os.write(os.memfd_create('x'), b'x')")
  ),
  "environment: secrets": (
    "import os\nprint('refused' if 'GSPO_TOKEN' not in os.environ else 1)"
  ),
  "environment: of other processes": (
    "import ctypes, os\n"
    "print('refused' if os.getppid() == 1 and os.getpid() < 10 else 1)"
  ),
  "open files of the worker": (
    "import os\nopened = []\nfor fd in range(3, 1000):\n"
    "  try: os.fstat(fd); opened.append(fd)\n  except OSError: pass\n"
    "print('refused' if not opened else opened)"
  ),
  "privileges: root again": safely("import os\nos.setuid(0)"),
  "privileges: namespaces by clone": calls(
    *[(CLONE, flag | 17, 0, 0, 0, 0) for flag in NEW]
  ),
  "privileges: a thread in a namespace": calls(
    *[(CLONE, flag | 0x10F00, 0, 0, 0, 0) for flag in NEW]
  ),
  "privileges: a call that hides its flags": calls((435, 0, 0), errors=(38,)),
  "privileges: what a filter refuses": calls(
    *[(number, 0, 0, 0, 0, 0) for number in REFUSED]
  ),
  "privileges: more limits": safely(
    "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
    "OSError",
    "ValueError",
  ),
  "processes: killing its parents": (
    "import os, signal\nfor pid in (os.getppid(), 1, -1):\n"
    "  try: os.kill(pid, signal.SIGKILL)\n  except OSError: pass\n"
    "print('refused')"
  ),
  "processes: another": safely("import os\nos.fork()"),
  "processes: threads": (
    "import threading, time\n"
    + safely(
      "while True:\n"
      "  threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
      "RuntimeError",
    )
  ),
  "processes: a few threads are allowed": (
    "import threading\nends = []\n"
    "threads = [threading.Thread(target=ends.append, args=(i,))"
    " for i in range(8)]\n"
    "for t in threads: t.start()\nfor t in threads: t.join()\n"
    "print('refused' if len(ends) == 8 else ends)"
  ),
  "memory: at once": safely("bytearray(1 << 29)", "MemoryError"),
  "memory: of the kernel, for sockets": (
    "import socket\nheld, sent = [], 0\n"
    "try:\n  while True:\n"
    "    held += socket.socketpair()\n"
    "    for one in held[-2:]:\n"
    "      one.setblocking(False)\n"
    "      try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)\n"
    "      except OSError: pass\n"
    "      try:\n        while True: sent += one.send(bytes(1 << 16))\n"
    "      except BlockingIOError: pass\n"
    "except OSError: pass\n"
    "print('refused' if sent < 32 << 20 else sent)"
  ),
}
KILLED = {
  "no output, exit code 0": "pass",
  "the right output, then a crash": (
    "import ctypes; print('refused', flush=True); ctypes.string_at(0)"
  ),
  "output on stderr": "import sys; print('refused', file=sys.stderr)",
  "a syntax error": "print('refused'",
  "a null byte": "print('refused')\0",
  "parentheses 100,000 deep": "(" * 100_000 + ")" * 100_000,
  "privileges: calls of 32 bits": INT80,
  "processes: itself again, with more memory": (
    "import os, sys\nos.execv('PYTHON', ['python', '-c', 'bytearray(1 << 29)'])"
  ),
  "memory: bit by bit": (
    "kept = []\nwhile True: kept.append(bytearray(1 << 20))"
  ),
  "memory: a tower of powers": "print(9**9**9**9)",
  "output: without end": "while True: print('refused')",
  "output: a gigabyte": "print('x' * (1 << 20) * 100)",
  "output: closed, running on": (
    "import os\nprint('refused', flush=True)\nos.close(1)\nwhile True: pass"
  ),
  "time: deaf to signals": (
    "import signal\nfor s in range(1, 64):\n"
    "  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError):"
    " pass\nwhile True: pass"
  ),
}
x32 = KILLED if platform.machine() == "x86_64" else PASSING
x32["privileges: calls of x32"] = (
  "import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)\nprint('refused')"
)


def fenced(program):
  return f"So:\n```python\n{program}\n```\nDone."


def outcomes(spec, responses, reference, seconds):
  """Name -> 0, 1 or FAILED; one pool for all."""
  calls = [Response("", text, reference) for text in responses.values()]
  with RewardPool([spec], [1.0], workers=2, seconds=seconds, memory=1) as pool:
    rewards = pool.submit(calls).result()
  outcomes = zip(responses, rewards.total, rewards.failed, strict=True)
  return {k: FAILED if failed else int(total) for k, total, failed in outcomes}


@pytest.fixture(scope="module")
def math():
  return outcomes("math", RIGHT | WRONG, "18", 3)


@pytest.fixture(scope="module")
def code():
  try:
    rewards.named("code")
  except UserError as e:
    pytest.skip(str(e))
  responses = {}
  for name, program in (PASSING | KILLED).items():
    program = program.replace("HOME", os.path.expanduser("~"))
    responses[name] = fenced(program.replace("PYTHON", sandbox_files.PYTHON))
  reference = json.dumps([{"input": "", "output": "refused\n"}])
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("GSPO_TOKEN", "secret")
    return outcomes(f"code:seconds=2,memory={MEMORY}", responses, reference, 40)


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_math(math, name):
  assert math[name] == (name in RIGHT)


@pytest.mark.parametrize("name", [*PASSING, *KILLED])
def test_code(code, name):
  assert code[name] == (name in PASSING)


def test_programs_leave_nothing_running(code):
  end = time.monotonic() + 5
  while left := [c for c in commands() if str(MEMORY << 20) in c]:
    assert time.monotonic() < end, left
    time.sleep(0.05)
