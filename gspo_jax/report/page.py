"""The page: one HTML file that needs no other file."""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from etils import epath
from plotly.offline import get_plotlyjs

from gspo_jax.report import samples, tables
from gspo_jax.report.charts import COLOURS, Plot, of_subject, template
from gspo_jax.report.subjects import SUBJECTS
from gspo_jax.report.workdir import RunRecord, read
from gspo_jax.runtime.errors import UserError

STYLE, SCRIPT = (
  Path(__file__).with_name(name).read_text() for name in ("page.css", "page.js")
)
# The colours of figures are those of page.css.
_THEMES = {
  "light": template(
    "plotly_white", "#444649", ("#ffffff", "#6baed6", "#08306b")
  ),
  "dark": template("plotly_dark", "#c5c7ca", ("#1d2025", "#3d84c6", "#e8f3ff")),
}


def write(workdirs: Sequence[str], to: str | None = None) -> epath.Path:
  """Writes the page of these runs; returns its path.

  Args:
    workdirs: of runs, local or in a bucket; several are compared.
    to: the file; None for report.html in the only workdir.

  Raises:
    UserError: a folder has no run, or the page cannot be written.
  """
  if len(workdirs) > len(COLOURS):
    raise UserError(
      f"{len(workdirs)} runs: expected at most {len(COLOURS)}, the number of "
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
  figures, sections, taken = {}, [], set()
  for subject in SUBJECTS:
    plots, constant, scalars = of_subject(subject, runs, taken)
    html = ""
    for plot in plots:
      name = f"chart-{len(figures)}"
      html += _figure(name, plot)
      figures[name] = json.loads(plot.figure.to_json())
      figures[name]["title"] = plot.title
    if html:
      html = f'<div class="grid-of">{html}</div>'
    if constant:
      html += f"<p class=still>Constant: {escape(', '.join(constant))}.</p>"
    if scalars:
      html += tables.numbers(scalars, runs)
    sections.append(_Section(subject.title, html))
  sections.append(_Section("Sample responses", samples.of_runs(runs)))
  sections.append(_Section("Config", tables.config(runs)))
  return _document(runs, [s for s in sections if s.html], figures)


def _figure(name: str, plot: Plot) -> str:
  """The place of a plot, with its text."""
  kind = ' class="warning"' if plot.warning else ""
  title, note = escape(plot.title), ""
  if plot.note:
    note = f"<p>{escape(plot.note)}</p>"
  return (
    f'<figure{kind} aria-label="{title}. {escape(plot.summary)}">'
    f'<figcaption>{title}</figcaption><div class="chart" id="{name}"></div>'
    f"{note}</figure>"
  )


class _Section(NamedTuple):
  title: str
  html: str

  @property
  def id(self) -> str:
    return self.title.lower().replace(" ", "-")


def _document(
  runs: Sequence[RunRecord], sections: Sequence[_Section], figures: dict
) -> str:
  title = escape(tables.title(runs))
  links = "".join(f'<a href="#{s.id}">{escape(s.title)}</a>' for s in sections)
  body = "".join(
    f'<section id="{s.id}"><h2>{escape(s.title)}</h2>{s.html}</section>'
    for s in sections
  )
  templates = {name: t.to_plotly_json() for name, t in _THEMES.items()}
  data = _json({"figures": figures, "templates": templates})
  plotly = get_plotlyjs()
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta http-equiv="Content-Security-Policy" '
    f'content="{_policy(plotly, SCRIPT)}">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<link rel="icon" href="data:,"><title>{title}</title>'
    f"<style>{STYLE}</style></head><body>{tables.head(runs)}"
    "<noscript>The charts need JavaScript.</noscript>"
    f"<nav>{links}</nav>{tables.legend(runs)}<main>{body}</main>"
    f'<script type="application/json" id="data">{data}</script>'
    f"<script>{plotly}</script><script>{SCRIPT}</script></body></html>\n"
  )


def _policy(*scripts: str) -> str:
  """The content security policy: load nothing, run only these scripts."""
  hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
  allowed = " ".join(f"'sha256-{base64.b64encode(h).decode()}'" for h in hashes)
  # blob: is a chart on its way to a PNG file.
  return (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
    f"script-src {allowed}"
  )


def _json(data: dict) -> str:
  # The name of a run must not end the script element.
  text = json.dumps(data, allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c")
