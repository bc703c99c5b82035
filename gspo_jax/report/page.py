"""The page: one HTML file that needs no other file."""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from etils import epath
from plotly.offline import get_plotlyjs

from gspo_jax.report import samples, tables
from gspo_jax.report.charts import COLOURS, Plot, of_section, sections, template
from gspo_jax.report.workdir import RunRecord, read
from gspo_jax.runtime.errors import UserError, with_reason

STYLE, SCRIPT = (
  Path(__file__).with_name(name).read_text() for name in ("page.css", "page.js")
)
# The same colours as in page.css.
_THEMES = {
  "light": template("plotly_white", "#444649", "#ffffff"),
  "dark": template("plotly_dark", "#c5c7ca", "#1d2025"),
}


def write(workdirs: Sequence[str], to: str | None = None) -> epath.Path:
  """Writes the page, by default to report.html of the only workdir."""
  if len(workdirs) > len(COLOURS):
    raise UserError(
      f"{len(workdirs)} runs: expected at most {len(COLOURS)}, the number of "
      "different colours"
    )
  if to is None and len(workdirs) > 1:
    raise UserError("--to is missing: the file for the page of several runs")
  path = epath.Path(to) if to else epath.Path(workdirs[0]) / "report.html"
  text = page(read(workdirs))
  with with_reason(f"cannot write {str(path)!r}"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(errors="replace"))
  return path


def page(runs: Sequence[RunRecord]) -> str:
  figures, parts, metrics = {}, [], []
  for section, names in sections(runs).items():
    metrics += names
    html = ""
    for plot in of_section(names, runs):
      name = f"chart-{len(figures)}"
      html += _figure(name, plot)
      figures[name] = json.loads(plot.figure.to_json())
      figures[name]["title"] = plot.title
    parts.append((section, html and f'<div class="grid-of">{html}</div>'))
  parts.append(("Numbers", tables.numbers(metrics, runs)))
  parts.append(("Sample responses", samples.of_runs(runs)))
  parts.append(("Config", tables.config(runs)))
  return _document(runs, [part for part in parts if part[1]], figures)


def _figure(name: str, plot: Plot) -> str:
  title = escape(plot.title)
  note = f"<p>{escape(plot.note)}</p>" if plot.note else ""
  return (
    f'<figure aria-label="{title}. {escape(plot.summary)}">'
    f'<figcaption>{title}</figcaption><div class="chart" id="{name}"></div>'
    f"{note}</figure>"
  )


def _document(
  runs: Sequence[RunRecord], parts: Sequence[tuple[str, str]], figures: dict
) -> str:
  title = escape(tables.title(runs))
  links = body = ""
  for i, (name, html) in enumerate(parts):
    links += f'<a href="#part-{i}">{escape(name)}</a>'
    body += f'<section id="part-{i}"><h2>{escape(name)}</h2>{html}</section>'
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
  # blob: is for a chart that is saved as PNG.
  return (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
    f"script-src {allowed}"
  )


def _json(data: dict) -> str:
  # A run's name must not end the script element.
  text = json.dumps(data, allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c")
