"""The files that a program in the sandbox may read."""

import functools
import os
import subprocess
import sys
from pathlib import Path

from gspo_jax.runtime import errors

PYTHON = os.path.realpath(sys._base_executable)
# Readable folders in addition to the libraries, without installed packages.
FOLDERS = (os.path.dirname(os.__file__), "/usr/share/zoneinfo")
_PACKAGES = ("site-packages", "dist-packages")

# This prints the folder of the standard library, and the libraries that its
# modules load. The C library loads libgcc_s when a thread ends. Tk would need
# the whole of X.
_LIBRARIES = """
import ctypes, importlib.util, os, sys
for name in sys.stdlib_module_names - {"_tkinter"}:
  spec = importlib.util.find_spec(name)
  if spec and (spec.origin or "").endswith(".so"):
    try:
      importlib.import_module(name)
    except ImportError:
      pass
try:
  ctypes.CDLL("libgcc_s.so.1")
except OSError:
  pass
class Info(ctypes.Structure):  # struct dl_phdr_info
  _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
def show(info, size, data):
  print(os.fsdecode(info.contents.name))
  return 0
print(os.path.dirname(os.__file__))
kinds = ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p
show = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(show)
ctypes.CDLL(None).dl_iterate_phdr(show, None)
"""


def require_hidden(name: str, path: str) -> None:
  """UserError, with the name, if sandboxed programs can read the path."""
  path = Path(path).expanduser().resolve()
  for folder in (Path(folder).resolve() for folder in FOLDERS):
    packages = (folder / name for name in _PACKAGES)
    if path.is_relative_to(folder) and not any(
      map(path.is_relative_to, packages)
    ):
      raise errors.UserError(
        f"{name}: expected a path outside of {folder}, which programs of the "
        f"policy may read (reward 'code', environment 'python'), got {path}"
      )


@functools.cache
def arguments() -> list[str]:
  done = subprocess.run(
    [PYTHON, "-I", "-S", "-X", "utf8", "-c", _LIBRARIES],
    env={},
    capture_output=True,
    encoding="utf-8",
    check=True,
    timeout=60,
  )
  library, *loaded = done.stdout.splitlines()
  read = [PYTHON, library, *FOLDERS[1:], "/etc/ld.so.cache"]
  read += [x for x in loaded if x[:1] == "/" and not x.startswith(library)]
  # A folder that bwrap makes by itself is for root alone.
  parents = {parent for path in read for parent in Path(path).parents}
  arguments = []
  for folder in sorted(map(str, parents - {Path("/")} | {Path("/dev")})):
    arguments += ["--perms", "0755", "--dir", folder]
  for path in dict.fromkeys(read):
    arguments += ["--ro-bind-try", path, path]
  for folder in (f"{library}/{name}" for name in _PACKAGES):
    if os.path.isdir(folder):
      arguments += ["--perms", "0755", "--tmpfs", folder]
      arguments += ["--remount-ro", folder]
  for device in ("/dev/null", "/dev/urandom"):
    arguments += ["--dev-bind-try", device, device]
  return arguments
