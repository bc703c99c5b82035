"""The page: one HTML file that needs no other file."""

import base64
import hashlib
import itertools
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

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
  """Writes the page of these runs; returns its path.

  Args:
    workdirs: of runs, local or in a bucket; several are compared.
    to: the file; None for report.html in the only workdir.

  Raises:
    UserError: a folder has no run, or the page cannot be written.
  """
  if len(workdirs) > COLOURS:
    raise UserError(
      f"{len(workdirs)} runs: expected at most {COLOURS}, the number of "
      "different colours"
    )
  if to is None and len(workdirs) > 1:
    raise UserError("--to is missing: the file for the page of several runs")
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
    figures, constant, scalars = of_subject(subject, runs, taken)
    html = ""
    for figure in figures:
      name = f"chart-{next(count)}"
      html += f'<div id="{name}">{figure.html}</div>'
      if figure.data:
        data[name] = figure.data
    if html:
      html = f'<div class="grid-of">{html}</div>'
    if constant:
      html += f"<p class=still>Constant: {escape(', '.join(constant))}.</p>"
    if scalars:
      html += table(scalars, runs)
    sections.append(_Section(subject.title, html))
  sections.append(_Section("Sample responses", samples.of_runs(runs)))
  sections.append(_Section("Config", head.config(runs)))
  return _document(runs, [s for s in sections if s.html], data)


class _Section(NamedTuple):
  title: str
  html: str

  @property
  def id(self) -> str:
    return self.title.lower().replace(" ", "-")


def _document(
  runs: Sequence[RunRecord], sections: Sequence[_Section], data: dict
) -> str:
  title = escape(head.title(runs))
  links = "".join(f'<a href="#{s.id}">{escape(s.title)}</a>' for s in sections)
  body = "".join(
    f'<section id="{s.id}"><h2>{escape(s.title)}</h2>{s.html}</section>'
    for s in sections
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
  """The content security policy: load nothing, run only the page's script."""
  script = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
  return (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{script}'"
  )


def _json(data: dict) -> str:
  # The name of a run must not end the script element.
  text = json.dumps(data, allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c")
