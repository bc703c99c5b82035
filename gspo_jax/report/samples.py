"""The sample responses of a run, by step. Their text may be hostile."""

from collections.abc import Sequence
from html import escape

import numpy as np

from gspo_jax.record.run_files import Sample
from gspo_jax.report.workdir import RunRecord

_STEPS = 24  # on a page, over all runs
_RESPONSES = 6  # of a step
_MAX_CHARACTERS = 2400  # of a response; a longer one loses its middle


def of_runs(runs: Sequence[RunRecord]) -> str:
  """A block for each run that has samples; "" if none has."""
  with_samples = [run for run in runs if run.samples]
  limit = max(3, _STEPS // max(len(with_samples), 1))
  return "".join(_block(run, limit, len(runs) > 1) for run in with_samples)


def _block(run: RunRecord, limit: int, named: bool) -> str:
  steps = sorted(run.samples)
  count = min(limit, len(steps))
  indices = np.unique(np.linspace(0, len(steps) - 1, count).round())
  shown = [steps[int(i)] for i in indices]
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


def _step(step: int, samples: Sequence[Sample]) -> str:
  cards = "".join(map(_card, samples[:_RESPONSES]))
  return (
    f'<section data-step="{step}"><h4>Step {step:,}</h4>'
    f'<div class="cards">{cards}</div></section>'
  )


def _card(sample: Sample) -> str:
  problem, response, reference = (
    escape(_shorten(str(text)))
    for text in (sample.problem, sample.response, sample.reference)
  )
  return (
    f"<article><header><span>reward <b>{sample.reward:g}</b></span>"
    f"<span>reference <b>{reference}</b></span></header>"
    f'<pre class="problem">{problem}</pre><pre>{response}</pre></article>'
  )


def _shorten(text: str) -> str:
  if len(text) <= _MAX_CHARACTERS:
    return text
  half = _MAX_CHARACTERS // 2
  left = len(text) - 2 * half
  return f"{text[:half]}\n… {left:,} characters left out …\n{text[-half:]}"
