"""The documentation as a site: `sphinx-build -W docs build/docs`.

Pages are Markdown that also reads well on a git forge. Two things are made
here: the tables of config.md, from the config itself, and links to files of the
repository, which become links to the forge.
"""

import configparser
import re
from pathlib import Path

import gspo_jax
from gspo_jax.program.config_reference import describe

ROOT = Path(__file__).parent.parent
_setup = configparser.ConfigParser()
_setup.read(ROOT / "setup.cfg")
URL = _setup["metadata"]["url"]

project = "gspo_jax"
author = _setup["metadata"]["author"]
copyright = author
version = release = gspo_jax.__version__
extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.mathjax",
  "sphinx.ext.napoleon",
]
default_role = "code"  # single backticks in docstrings
smartquotes_action = "D"  # dashes alone: values are copied from the pages
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields of a class stay out of the contents
napoleon_use_rtype = False
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "gspo_jax"
html_theme_options = {
  "source_repository": URL,
  "source_branch": "main",
  "source_directory": "docs/",
}
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_show_sphinx = False

CONFIG_TABLES = "<!-- tables -->"


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


_HEAD = ["", "| key | default | meaning |", "|---|---|---|"]


def _complete(app, page: str, source: list[str]) -> None:
  """Fills in the tables, and directs links to the repository to the forge."""
  if page == "config":
    source[0] = source[0].replace(CONFIG_TABLES, config_tables())
  link = r"(?<!!)(\[[^\]]*\]\()\.\./"  # images are copied into the site
  source[0] = re.sub(link, rf"\1{URL}/blob/main/", source[0])


def _escape(app, what, name, obj, options, lines: list[str]) -> None:
  """A * or | in a formula of a docstring is no markup, and "l." no list."""
  markup = r"`[^`]*`|[*|]|(?<=: )\w(?=\. )"
  escaped = lambda match: match[0] if match[0][0] == "`" else rf"\{match[0]}"
  lines[:] = [re.sub(markup, escaped, line) for line in lines]


def setup(app) -> None:
  app.connect("source-read", _complete)
  app.connect("autodoc-process-docstring", _escape, priority=400)
