"""Suggestions for a key that a config does not have."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from gspo_jax.runtime.errors import either, mistyped


def _read(text: str) -> tuple[dict[str, list[str]], dict[str, str]]:
  """The other names of each key, and the units of some."""
  names, units = {}, {}
  for entry in re.findall(r"^[^#\n].*(?:\n  .*)*", text, re.MULTILINE):
    words, _, unit = entry.partition("#")
    key, *others = words.split()
    names[key] = others
    if unit:
      units[key] = unit.strip()
  return names, units


OTHER_NAMES, _COUNTS = _read(
  Path(__file__).with_name("other_names.txt").read_text()
)

# Last parts of keys that mean something else in each section.
_GENERIC = ("name", "dir", "steps", "batch", "clip")


def near(key: str, keys: Collection[str]) -> list[str]:
  """Keys that may be meant: by a name in other trainers, else by a typo."""
  named = _of_other_trainers(key, keys)
  return named or _typo(key, keys) + _in_another_section(key, keys)


def did_you_mean(meant: Sequence[str], prefix: str = "") -> str:
  """The question after the keys of `near`, each with `prefix` before it."""
  counts = _COUNTS.get(meant[0], "") if len(meant) == 1 else ""
  names = either(prefix + key for key in meant)
  return f"did you mean {names}{counts and f' ({counts})'}?"


def hint(key: str, keys: Collection[str]) -> str:
  """The end of the error for an unknown key: keys of `near`, else a list."""
  if meant := near(key, keys):
    return did_you_mean(meant)
  section = key.partition(".")[0] + "."
  inside = [k.removeprefix(section) for k in keys if k.startswith(section)]
  if inside:
    return f"{section[:-1]} has {', '.join(sorted(inside))}"
  sections = sorted({k.partition(".")[0] for k in keys if "." in k})
  alone = sorted(k for k in keys if "." not in k)
  return f"sections are {', '.join(sections)}; without one: {', '.join(alone)}"


def _of_other_trainers(key, keys):
  parts = key.split(".")
  for i in range(len(parts)):
    name = _plain(".".join(parts[i:]))
    ours = [
      k
      for k, others in OTHER_NAMES.items()
      if k.partition("=")[0] in keys and name in map(_plain, others)
    ]
    if ours:
      in_section = [k for p in parts for k in ours if k.startswith(f"{p}.")]
      return (in_section or ours)[:1]
  return []


def _in_another_section(key, keys):
  section, _, leaf = key.rpartition(".")
  same = sorted(k for k in keys if _plain(_leaf(k)) == _plain(leaf))
  meant = mistyped(section, {k.rpartition(".")[0] for k in same})
  near = [k for k in same if k.rpartition(".")[0] in meant]
  return near or ([] if leaf in _GENERIC else same)


def _typo(key, keys):
  section, _, leaf = key.rpartition(".")
  inside = [k for k in sorted(keys) if k.rpartition(".")[0] == section]
  meant = mistyped(leaf, [_leaf(k) for k in inside])
  return [k for k in inside if _leaf(k) in meant]


def _leaf(key: str) -> str:
  return key.rpartition(".")[2]


def _plain(name: str) -> str:
  """The name in lower case without _ and -."""
  return name.replace("_", "").replace("-", "").lower()
