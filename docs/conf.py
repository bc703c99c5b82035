"""The documentation as a site: `sphinx-build -W docs build/docs`.

Pages are Markdown that also reads well on a git forge. Three things are made
here: docstrings in place of the signatures of api.md, links to files of the
repository, which become links to the forge, and equations in MathML, which a
browser shows without JavaScript.
"""

import configparser
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import gspo_jax

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))  # reference.py
import reference  # noqa: E402

ROOT = DOCS.parent
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
  "sphinx.ext.napoleon",
]
default_role = "code"  # single backticks in docstrings
smartquotes_action = "D"  # dashes alone: values are copied from the pages
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields of a class stay out of the contents
napoleon_use_rtype = False
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

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


def _complete(app, page: str, source: list[str]) -> None:
  """Puts docstrings into the API, and directs links to the forge."""
  if page == "api":
    source[0] = reference.filled(source[0], reference.directives)
  link = r"(?<!!)(\[[^\]]*\]\()\.\./"  # images are copied into the site
  source[0] = re.sub(link, rf"\1{URL}/blob/main/", source[0])


def _escape(app, what, name, obj, options, lines: list[str]) -> None:
  """A * or | in a formula of a docstring is no markup, and "l." no list."""
  markup = r"`[^`]*`|[*|]|(?<=: )\w(?=\. )"
  escaped = lambda match: match[0] if match[0][0] == "`" else rf"\{match[0]}"
  lines[:] = [re.sub(markup, escaped, line) for line in lines]


def _inline_math(translator, node) -> None:
  translator.body.append(tex2mathml(node.astext()))
  raise nodes.SkipNode


def _block_math(translator, node) -> None:
  equation = tex2mathml(node.astext(), as_block=True)
  translator.body.append(f'<div class="math notranslate">{equation}</div>')
  raise nodes.SkipNode


def setup(app) -> None:
  app.add_html_math_renderer(
    "mathml", (_inline_math, None), (_block_math, None)
  )
  app.connect("source-read", _complete)
  app.connect("autodoc-process-docstring", _escape, priority=400)
