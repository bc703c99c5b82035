"""UserError, and texts that errors share: install this, did you mean that."""

import contextlib
import errno
import re
import sys
from collections.abc import Iterable, Iterator


class UserError(ValueError):
  """A mistake in a config, a flag or a file.

  Its message is one line. The commands print it and exit with code 2, after
  which no scheduler should start them again.
  """


def complain(error: Exception) -> int:
  """Prints an error of the caller in one line; returns the exit code."""
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
  return 2


def install(extra: str) -> str:
  """How to install an extra: from a checkout, for no registry has gspo_jax."""
  return f"pip install -e '.[{extra}]', in a checkout of gspo_jax"


@contextlib.contextmanager
def needs_extra(extra: str, user: str) -> Iterator[None]:
  """Raises an ImportError as UserError: `user` needs a package of `extra`."""
  try:
    yield
  except ImportError as error:
    raise UserError(
      f"{user} needs a package that is not installed ({error}): "
      f"{install(extra)}"
    ) from error


def how_to_download(folder: str) -> str:
  """The end of an error for a missing folder that looks like an OWNER/NAME."""
  model = re.fullmatch(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)", str(folder))
  if not model:
    return ""
  return (
    "; nothing is downloaded here: for a model of the Hugging Face Hub, "
    f"`hf download {folder} --local-dir {model[1]}`, then ./{model[1]}"
  )


@contextlib.contextmanager
def with_reason(subject: str) -> Iterator[None]:
  """Raises the error of a folder or bucket as UserError "SUBJECT: reason".

  An outage is raised unchanged, with `subject` as a note. So the command ends
  with exit code 1, and the schedulers of launch/ start it again.
  """
  try:
    yield
  except Exception as error:  # the HttpError of gcsfs is not an OSError
    if isinstance(error, UserError):
      raise
    if not _is_callers(error):
      error.add_note(subject)
      raise
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
      reason = error.strerror or str(error)
    reason = " ".join(reason.split())
    raise UserError(f"{subject}: {reason}") from error


@contextlib.contextmanager
def content_of(subject: str) -> Iterator[None]:
  """Raises what the content of a file causes as UserError "SUBJECT: reason".

  For code that interprets a user's file, such as a chat template: it would
  raise the same error after every restart. An OSError is raised unchanged.
  """
  try:
    yield
  except (UserError, OSError):
    raise
  except Exception as error:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise UserError(f"{subject}: {reason[:200]}") from error


@contextlib.contextmanager
def prefixed(subject: str) -> Iterator[None]:
  """Puts "SUBJECT: " before the message of a UserError."""
  try:
    yield
  except UserError as error:
    raise type(error)(f"{subject}: {error}") from error


_ERRNOS_OF_CALLERS = {
  *(errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSPC, errno.EROFS),
  *(errno.EACCES, errno.EPERM, errno.EDQUOT, errno.EFBIG, errno.ENOTEMPTY),
}


def _is_callers(error: Exception) -> bool:
  """Whether the same access would fail again, until the caller mends it."""
  if isinstance(error, OSError):
    missing = FileNotFoundError, FileExistsError, PermissionError
    wrong_kind = NotADirectoryError, IsADirectoryError
    return (
      isinstance(error, missing + wrong_kind)
      or error.errno in _ERRNOS_OF_CALLERS
      or str(error).startswith("Forbidden")  # gcsfs, without an errno
    )
  if isinstance(error, ImportError):
    return True
  if isinstance(error, KeyError):  # epath raises it for an unknown scheme
    return "://" in str(error)
  if str(error).startswith("Bad Request"):  # ValueError of gcsfs
    return True
  names = _classes(error)  # of google.auth, which is not imported here
  if "TransportError" in names:  # gcsfs raises it with code 401
    return False
  code = str(getattr(error, "code", None))
  refused = code in ("400", "401", "403", "404")
  return refused or "DefaultCredentialsError" in names


def _classes(error: BaseException) -> set[str]:
  names = {cls.__name__ for cls in type(error).__mro__}
  return names | (_classes(error.__cause__) if error.__cause__ else set())


def nearest(name: str, choices: Iterable[str]) -> str:
  """The end of an error: "did you mean 'x'?" if mistyped, else all choices."""
  choices = sorted(choices)
  if close := mistyped(name, choices):
    return f"did you mean {either(close)}?"
  return f"choose one of {', '.join(choices)}"


def either(names: Iterable[str]) -> str:
  """Joins names as `'a', 'b' or 'c'`."""
  *rest, last = map(repr, names)
  return f"{', '.join(rest)} or {last}" if rest else last


def mistyped(name: str, choices: Iterable[str]) -> list[str]:
  """The choices with the fewest typos: one at most, or two in a long name.

  A typo is an added, missing or wrong letter, or two adjacent letters swapped.
  A name of 1 or 2 letters may have none, a name of 3 to 5 letters one. Case is
  ignored. Digits must agree: qwen3-14b is not a typo of qwen3-4b.
  """
  distances = {}
  for choice in choices:
    a, b = name.casefold(), choice.casefold()
    if re.findall(r"\d", a) == re.findall(r"\d", b):
      distances[choice] = _edit_distance(a, b)
  least = min(distances.values(), default=0)
  if least > min(len(name) // 3, 2):
    return []
  return [choice for choice, typos in distances.items() if typos == least]


def _edit_distance(a: str, b: str) -> int:
  """The Damerau-Levenshtein distance, restricted to adjacent swaps."""
  before_last, last = [], list(range(len(b) + 1))
  for i, x in enumerate(a):
    row = [i + 1]
    for j, y in enumerate(b):
      least = min(last[j + 1] + 1, row[j] + 1, last[j] + (x != y))
      if i and j and (x, a[i - 1]) == (b[j - 1], y):
        least = min(least, before_last[j - 1] + 1)
      row.append(least)
    before_last, last = last, row
  return last[-1]
