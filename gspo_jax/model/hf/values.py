"""Numbers of a config.json, and the error for a value that is not supported."""

from gspo_jax.runtime.errors import UserError


def number(path, raw, names, *, default=None, kind=int):
  """The number of the first of these keys that is there, above 0."""
  value = next((raw[n] for n in names if raw.get(n) is not None), default)
  if value is None:
    raise UserError(f"{path}: {' or '.join(names)} is missing")
  ok = isinstance(value, (int, kind)) and not isinstance(value, bool)
  if not ok or value <= 0:
    raise UserError(
      f"{path}: {names[0]}={value!r}: expected {kind.__name__} above 0"
    )
  return kind(value)


def unsupported(path, key, value, supported) -> UserError:
  """No nearest choice: another architecture is not a typing mistake."""
  return UserError(
    f"{path}: {key}={value!r}: not supported; supported are: "
    f"{', '.join(supported)}"
  )
