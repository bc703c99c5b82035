"""Trains a policy: flags in, an exit code out.

  python -m gspo_jax.main --config=configs/tiny_cpu.py --workdir=runs/tiny

The console command gspo-jax is the same. `--help` lists every key of a config.

On several hosts, start the same command with the same workdir on each. On a
Cloud TPU slice the hosts find one another; elsewhere each needs
`--coordinator=HOST:PORT --num_processes=N --process_id=I`.

Ctrl-C and SIGTERM save the run after this iteration and end it. A second Ctrl-C
ends the process at once.

Exit codes, the same on every host: 0 done; 75 (EX_TEMPFAIL of sysexits.h)
stopped by SIGTERM before the last step with everything saved, for a scheduler
to start the same command again; 2 a mistake of the caller's, in one line; 130
after a second Ctrl-C; anything else is a fault or an outage, with its
traceback.
"""

import os
import signal
import sys
import threading

from gspo_jax.program import command

INTERRUPTED, ENDED = 75, 130
_ending = threading.Lock()


def main() -> None:
  _watch_signals()
  sys.path.append("")  # to import the user's modules, as with `python -m`
  command.run(lambda: command.on_hosts(_train), command.START, __doc__)


def _train() -> int:
  from gspo_jax import train

  state = train.train_and_evaluate(command.CONFIG.value, command.WORKDIR.value)
  # All is saved: a signal from here on must not change the exit code.
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  return INTERRUPTED if state is None else 0


def _watch_signals() -> None:
  """SIGTERM before training ends the process; Ctrl-C during it is a SIGTERM."""
  read, write = os.pipe()
  os.set_blocking(write, False)
  signal.signal(signal.SIGTERM, _before_training)
  # A shell's & ignores Ctrl-C.
  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: None)
  signal.set_wakeup_fd(write, warn_on_full_buffer=False)
  # A thread: Python's own handlers wait for the main thread, which may be in
  # C++ for minutes, in a compilation or an iteration.
  threading.Thread(target=_act, args=(read,), daemon=True).start()


def _act(pipe: int) -> None:
  """Acts on each signal; Python writes its number into the pipe."""
  asked = False
  while True:
    number = os.read(pipe, 1)[0]
    training = signal.getsignal(signal.SIGTERM) is not _before_training
    if number == signal.SIGINT and asked:
      _end(ENDED, "a second Ctrl-C: ended; the same command resumes")
    elif number == signal.SIGINT and training:
      asked = True
      text = "Ctrl-C: saves after this iteration, a second one ends at once"
      print(text, file=sys.stderr, flush=True)
      os.kill(os.getpid(), signal.SIGTERM)
    elif number in (signal.SIGINT, signal.SIGTERM) and not training:
      _before_training()


def _before_training(*_) -> None:
  _end(INTERRUPTED, "stopped before training; start the same command again")


def _end(code: int, text: str) -> None:
  if _ending.acquire(blocking=False):  # else another thread is about to end it
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
  main()
