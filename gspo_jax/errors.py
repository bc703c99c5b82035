"""What a user did wrong, said in one line: value, expected, nearest choice."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """A mistake in a config, a flag or a file; `main` prints it and exits 2."""


def nearest(name: str, choices: Iterable[str]) -> str:
  """The hint that ends an error: the nearest valid choice, else all of them."""
  choices = sorted(choices)
  close = difflib.get_close_matches(name, choices, n=1)
  if close:
    return f"did you mean {close[0]!r}?"
  return f"choose one of {', '.join(choices)}"
