"""The argument of a study's config: `method=grpo,rate=3e-4,seed=1`."""

from types import SimpleNamespace


def read(text: str, **defaults) -> SimpleNamespace:
  """The defaults, each replaced where the text names it, in its own type.

  Raises:
    ValueError: a key without a default, or a value of another type.
  """
  found = dict(defaults)
  for part in filter(None, text.split(",")):
    key, _, value = part.partition("=")
    if key not in defaults:
      raise ValueError(f"{part!r}: expected KEY=VALUE of {', '.join(defaults)}")
    found[key] = type(defaults[key])(value)
  return SimpleNamespace(**found)


def write(**values) -> str:
  """The text that `read` reads."""
  return ",".join(f"{key}={value}" for key, value in values.items())
