"""Sample answers of a run, one step at a time. All of it is hostile text."""

from collections.abc import Sequence
from html import escape

import numpy as np

from gspo_jax.report.workdir import RunRecord
from gspo_jax.runtime import run_files

_STEPS = 24  # on a page, over all runs
_ANSWERS = 6  # of a step
_LONGEST = 2400  # characters of an answer; the middle of a longer one goes


def of_runs(runs: Sequence[RunRecord]) -> str:
  """A block of each run that has samples; "" without any."""
  having = [run for run in runs if run.samples]
  most = max(3, _STEPS // max(len(having), 1))
  return "".join(_block(run, most, len(runs) > 1) for run in having)


def _block(run: RunRecord, most: int, named: bool) -> str:
  steps = sorted(run.samples)
  shown = np.unique(
    np.linspace(0, len(steps) - 1, min(most, len(steps))).round()
  )
  shown = [steps[int(i)] for i in shown]
  name = f"<h3>{escape(run.name)}</h3>" if named else ""
  left = (
    f", {len(shown)} of {len(steps)} files" if len(shown) < len(steps) else ""
  )
  picker = (
    f'<p class="picker" hidden><label>Step <output>{shown[-1]:,}</output> '
    f'<input type="range" min="0" max="{len(shown) - 1}" '
    f'value="{len(shown) - 1}"></label><span class="muted">'
    f"{shown[0]:,} to {shown[-1]:,}{left}</span></p>"
  )
  parts = [_step(step, run.samples[step]) for step in shown]
  return f'{name}<div class="samples">{picker}{"".join(parts)}</div>'


def _step(step: int, text: str) -> str:
  cards = [_card(sample) for sample in run_files.parse_samples(text)]
  if not cards:
    cards = [f"<pre>{escape(cut(text))}</pre>"] if text.strip() else []
  return (
    f'<section data-step="{step}"><h4>Step {step:,}</h4>'
    f'<div class="cards">{"".join(cards[:_ANSWERS])}</div></section>'
  )


def _card(sample: run_files.Sample) -> str:
  question, answer, reference, reward = (escape(cut(part)) for part in sample)
  return (
    f"<article><header><span>reward <b>{reward}</b></span>"
    f"<span>reference <b>{reference}</b></span></header>"
    f'<pre class="question">{question}</pre><pre>{answer}</pre></article>'
  )


def cut(text: str) -> str:
  """Begin and end of a long text, and how much is missing."""
  if len(text) <= _LONGEST:
    return text
  half = _LONGEST // 2
  left = len(text) - 2 * half
  return f"{text[:half]}\n… {left:,} characters left out …\n{text[-half:]}"
