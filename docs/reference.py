"""Writes the tables of config.md and the signatures of api.md.

python docs/reference.py

A page has markers, `<!-- reference: WHAT -->` and `<!-- end -->`, and the text
between them is made here. WHAT is `config`, or a module and the names in it. On
the site Sphinx shows whole docstrings in place of the signatures, see conf.py.
"""

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from gspo_jax.program.config_reference import describe

PAGES = ("config.md", "api.md")
_MARKED = re.compile(
  r"(<!-- reference: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL
)
_HEAD = ["", "| key | default | meaning |", "|---|---|---|"]
_PLAIN = (bool, int, float, str, tuple, type(None))


def filled(page: str, text_of: Callable[[str], str]) -> str:
  """The page with `text_of(WHAT)` between each pair of markers."""
  return _MARKED.sub(lambda m: f"{m[1]}\n{text_of(m[2])}\n{m[3]}", page)


def text(what: str) -> str:
  """What a page has in the repository: the tables, or the signatures."""
  return config_tables() if what == "config" else signatures(what)


def config_tables() -> str:
  """Every key of a config with its default and its meaning, in Markdown."""
  lines = ["## Without a section", *_HEAD]
  for key, default, comment in describe():
    meaning = re.sub(r"([*|<$[\]])", r"\\\1", comment)
    if default is None:
      lines += ["", f"## {key}"]
      if meaning:
        lines += ["", f"{meaning[0].upper()}{meaning[1:].rstrip('.')}."]
      lines += _HEAD
    else:
      shown = f"`{default}`" if default != "" else '`""`'
      lines.append(f"| `{key}` | {shown} | {meaning} |")
  return "\n".join(lines) + "\n"


def signatures(what: str) -> str:
  """The signature and the first line of each docstring."""
  stubs = [_stub(name, value) for name, value in _named(what)]
  return "```text\n" + "\n".join(stubs) + "```\n"


def directives(what: str) -> str:
  """Directives of Sphinx' autodoc for the same names."""
  module = what.partition(":")[0]
  lines = ["```{eval-rst}", f".. currentmodule:: {module}"]
  for name, value in _named(what):
    kind = "class" if inspect.isclass(value) else "function"
    lines.append(f".. auto{'method' if '.' in name else kind}:: {name}")
    if kind == "class":
      lines.append("   :no-undoc-members:")
  return "\n".join(lines) + "\n```\n"


def _named(what: str) -> list[tuple[str, object]]:
  """The names of a marker, and what they are the names of."""
  module, _, names = what.partition(":")
  found = []
  for name in names.split():
    value = importlib.import_module(module)
    for part in name.split("."):
      value = getattr(value, part)
    found.append((name, value))
  return found


def _stub(name: str, value) -> str:
  signature = inspect.signature(value)
  parameters = [_without_type(p) for p in signature.parameters.values()]
  signature = signature.replace(
    parameters=parameters, return_annotation=signature.empty
  )
  call = f"{name}{signature}".replace("Ellipsis", "...")
  lines = textwrap.wrap(call, 96, subsequent_indent="    ")
  first = inspect.getdoc(value).partition("\n")[0]
  return "\n".join([*lines, f"  # {first}", ""])


def _without_type(parameter: inspect.Parameter) -> inspect.Parameter:
  """The parameter with its default alone, `...` where that is an object."""
  default = parameter.default
  if default is not parameter.empty and type(default) not in _PLAIN:
    default = ...
  return parameter.replace(annotation=parameter.empty, default=default)


def main() -> None:
  for name in PAGES:
    page = Path(__file__).with_name(name)
    page.write_text(filled(page.read_text(), text))


if __name__ == "__main__":
  main()
