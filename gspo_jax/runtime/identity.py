"""Whether a checkpoint belongs to this run, by comparing two configs."""

from typing import Any

from gspo_jax.runtime.errors import UserError


def match(wanted: dict, saved: dict, what: str) -> None:
  """Checks that a checkpoint was saved by a run with the same identity.

  Args:
    wanted: the identity of this run: nested dicts of JSON values.
    saved: the metadata of the checkpoint, with its identity as "identity".
    what: the noun for the error message, such as "checkpoint".

  Raises:
    UserError: with the first key in which the two identities differ.
  """
  wanted, saved = flatten(wanted), flatten(saved.get("identity", {}))
  for key in wanted | saved:
    if wanted.get(key) != saved.get(key):
      raise UserError(
        f"the {what} in this folder is of another run: it has "
        f"{key}={saved.get(key)!r}, this run {key}={wanted.get(key)!r}; use "
        "another folder"
      )


def changes(saved: dict, now: dict) -> list[str]:
  """One line for each key whose value differs between two configs."""
  saved, now = flatten(saved), flatten(now)
  return [
    f"changed since: {key}={saved.get(key)!r} is now {now.get(key)!r}"
    for key in saved | now
    if saved.get(key) != now.get(key)
  ]


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
  """The leaves of nested dicts or ConfigDicts, by their dotted names.

  A leaf is any value without an `items` method.
  """
  leaves = {}
  for key, value in tree.items():
    if hasattr(value, "items"):
      leaves |= flatten(value, f"{prefix}{key}.")
    else:
      leaves[prefix + key] = value
  return leaves
