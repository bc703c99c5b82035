"""What makes two runs the same: a checkpoint of another is not resumed."""

from gspo_jax.runtime.errors import UserError


def match(wanted: dict, saved: dict, what: str) -> None:
  """UserError naming the first entry in which two identities differ.

  Args:
    wanted: that of this run.
    saved: the metadata of a checkpoint, which holds its "identity".
    what: is saved.
  """
  wanted, found = flatten(wanted), flatten(saved.get("identity", {}))
  for key in wanted | found:
    if wanted.get(key) != found.get(key):
      raise UserError(
        f"the {what} saved here is another: it has {key}={found.get(key)!r}, "
        f"this run {key}={wanted.get(key)!r}; use another folder"
      )


def flatten(tree: dict, prefix: str = "") -> dict:
  """The leaves of nested dicts by their dotted names."""
  leaves = {}
  for key, value in tree.items():
    if isinstance(value, dict):
      leaves |= flatten(value, f"{prefix}{key}.")
    else:
      leaves[prefix + key] = value
  return leaves


def changes(saved: dict, now: dict) -> list[str]:
  """A line for each key of a config that is not as it was saved."""
  saved, now = flatten(saved), flatten(now)
  return [
    f"changed since: {key}={saved.get(key)!r} is now {now.get(key)!r}"
    for key in saved | now
    if saved.get(key) != now.get(key)
  ]
