"""The page: one HTML file that needs nothing beside itself."""

import base64
import hashlib
import itertools
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from etils import epath

from gspo_jax.report import head, samples
from gspo_jax.report.chart import COLOURS
from gspo_jax.report.figures import of_subject, table
from gspo_jax.report.subjects import SUBJECTS
from gspo_jax.report.workdir import RunRecord, read
from gspo_jax.runtime.errors import UserError

STYLE, SCRIPT = (
  Path(__file__).with_name(name).read_text() for name in ("page.css", "page.js")
)


def write(workdirs: Sequence[str], to: str | None = None) -> epath.Path:
  """Writes the page of these runs: where it lies.

  Args:
    workdirs: of runs, local or in a bucket; several are compared.
    to: the file; None: report.html in the workdir, of which there is one.

  Raises:
    UserError: a folder holds no run, or the page cannot be written.
  """
  if len(workdirs) > COLOURS:
    raise UserError(
      f"{len(workdirs)} runs: expected at most {COLOURS}, which is how many "
      "colours can be told apart"
    )
  if to is None and len(workdirs) > 1:
    raise UserError("--to is missing: where the page of several runs goes")
  path = epath.Path(to) if to else epath.Path(workdirs[0]) / "report.html"
  text = page(read(workdirs))
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(errors="replace"))
  except OSError as error:
    raise UserError(f"cannot write {str(path)!r}: {error.strerror}") from error
  return path


def page(runs: Sequence[RunRecord]) -> str:
  """The HTML of a page."""
  data, sections, taken = {}, [], set()
  count = itertools.count()
  for subject in SUBJECTS:
    figures, still, scalars = of_subject(subject, runs, taken)
    shown = ""
    for figure in figures:
      name = f"chart-{next(count)}"
      shown += f'<div id="{name}">{figure.html}</div>'
      if figure.data:
        data[name] = figure.data
    if shown:
      shown = f'<div class="grid-of">{shown}</div>'
    if still:
      shown += f"<p class=still>Constant: {escape(', '.join(still))}.</p>"
    if scalars:
      shown += table(scalars, runs)
    sections.append((subject.title, shown))
  sections.append(("What did it say?", samples.of_runs(runs)))
  sections.append(("The config", head.config(runs)))
  return _document(runs, [s for s in sections if s[1]], data)


def _document(runs, sections, data) -> str:
  title = escape(head.title(runs))
  places = [
    title.lower().strip("?").replace(" ", "-").replace("'", "")
    for title, _ in sections
  ]
  links = "".join(
    f'<a href="#{at}">{escape(name)}</a>'
    for at, (name, _) in zip(places, sections, strict=True)
  )
  body = "".join(
    f'<section id="{at}"><h2>{escape(name)}</h2>{html}</section>'
    for at, (name, html) in zip(places, sections, strict=True)
  )
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<link rel="icon" href="data:,"><title>{title}</title>'
    f"<style>{STYLE}</style></head><body>{head.head(runs)}"
    f"<nav>{links}</nav>{head.legend(runs)}<main>{body}</main>"
    '<div id="read"></div><script type="application/json" id="data">'
    f"{_json(data)}</script><script>{SCRIPT}</script></body></html>\n"
  )


def _policy() -> str:
  """Nothing is loaded, and no script runs but the page's own."""
  own = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
  return (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{own}'"
  )


def _json(data: dict) -> str:
  # A name of a run could end the script that it stands in.
  text = json.dumps(data, allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c")
