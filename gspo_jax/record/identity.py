"""Compares the config of a checkpoint with the config of this run."""

from typing import Any

from gspo_jax.runtime.errors import UserError

# Entry of an identity -> the config keys that set it; "": the entry itself.
_TYPED = {
  "model.dtype": "",
  "model.lora": "",
  "model": "model.checkpoint or model.variant",
  "tokenizer": "data.tokenizer or model.checkpoint",
  "data.fingerprint": "data.source, the content of what it names, or another "
  "data.* key",
  "cold_start.from": "model.checkpoint",
  "eval.fingerprint": "data.eval_source, or the content of what it or "
  "data.source names",
}


def match(wanted: dict, saved: dict, name: str, remedy: str) -> None:
  """Raises UserError unless the checkpoint has the identity of this run.

  Args:
    wanted: the identity of this run: nested dicts of JSON values.
    saved: the checkpoint's metadata; its identity is "identity".
    name: begins the error: "checkpoint in 'runs/a'".
    remedy: ends the error: "use another --workdir".
  """
  wanted, saved = flatten(wanted), flatten(saved.get("identity", {}))
  for key in wanted | saved:
    if wanted.get(key) != saved.get(key):
      parts = (p for p in _TYPED if f"{key}.".startswith(f"{p}."))
      typed = _TYPED.get(next(parts, ""), "")
      raise UserError(
        f"the {name} is of another run: "
        + (f"{typed} changed: " if typed else "")
        + f"it has {key}={saved.get(key)!r}, this run "
        f"{key}={wanted.get(key)!r}; {remedy}"
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
  """The leaves of nested dicts or ConfigDicts, by dotted name."""
  leaves: dict[str, Any] = {}
  for key, value in tree.items():
    if hasattr(value, "items"):
      leaves |= flatten(value, f"{prefix}{key}.")
    else:
      leaves[prefix + key] = value
  return leaves
