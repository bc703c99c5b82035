"""What runs on this machine."""

import os


def commands():
  """Command lines of all processes of this machine."""
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      with open(f"/proc/{pid}/cmdline") as file:
        yield file.read().replace("\0", " ")
    except OSError:
      pass
