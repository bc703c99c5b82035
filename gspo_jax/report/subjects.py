"""The subjects of a page and their charts: which metrics go where."""

import fnmatch
from collections.abc import Iterable
from typing import NamedTuple


class Chart(NamedTuple):
  """A chart for one run; for several runs, a chart for each metric.

  Attributes:
    title: of the chart.
    metrics: pattern of metric names -> label of the line; "" for the last part
      of the name. The first chart with a matching pattern gets a metric.
    unit: "%" for shares; else written after each number.
    note: text below the chart.
    log: whether the vertical axis is logarithmic.
    clips: "token" or "sequence" if the metrics are sizes of these log-ratios:
      the clip range is then marked; "" if not.
    skip_first: whether the axis ignores the first step, which compiles.
    each: whether every metric gets its own chart.
    no_signal: the note if a run has steps without signal. The chart is then a
      warning: it comes first, even if it never changes.
  """

  title: str
  metrics: dict[str, str]
  unit: str = ""
  note: str = ""
  log: bool = False
  clips: str = ""
  skip_first: bool = False
  each: bool = False
  no_signal: str = ""


class Spreads(NamedTuple):
  """Charts of distributions.

  Attributes:
    metrics: pattern of metric names -> title; "" for the name.
    unit: as of a `Chart`.
    note: as of a `Chart`.
    clips: as of a `Chart`, of the log-ratios themselves.
  """

  metrics: dict[str, str]
  unit: str = ""
  note: str = ""
  clips: str = ""


class Numbers(NamedTuple):
  """Metrics for the table only: sums of metrics that charts show."""

  metrics: dict[str, str]
  unit: str = ""


class Subject(NamedTuple):
  """A section of the page."""

  title: str
  charts: tuple[Chart | Spreads | Numbers, ...]


_NOISE_NOTE = (
  "Mean |log-prob of the trainer - log-prob of the sampler|: rounding alone. "
  "With objective.old_logps=sampler, differences above the clip range are "
  "clipped."
)

SUBJECTS = (
  Subject(
    "Rewards and evaluation",
    (
      Chart(
        "Held-out reward",
        {"eval/avg@*": "sampled", "eval/greedy": "greedy"},
        note="The first reward, of problems that are never trained on.",
      ),
      Chart(
        "Reward",
        {"reward/mean": "mean"},
        note="Weighted sum of all rewards, mean over the responses.",
      ),
      Chart(
        "Groups with mixed rewards",
        {"reward/mixed_groups": "mixed"},
        "%",
        "A group with equal rewards gives no advantage.",
        no_signal="No signal at 0%: the rewards of no group differed, so no "
        "response had an advantage.",
      ),
      Chart(
        "One of k is correct",
        {"eval/pass@*": ""},
        "%",
        "pass@k on the held-out problems: correct is a reward of at least "
        "reward.pass_threshold.",
      ),
      Chart("Parts of the reward", {"reward/*": ""}),
      Chart("Evaluation", {"eval/*": ""}, each=True),
    ),
  ),
  Subject(
    "Response length",
    (
      Chart("Length of a response", {"response/length": "mean"}, "tokens"),
      Chart("Cut at the limit", {"response/truncated": "responses"}, "%"),
      Chart(
        "Useful decode steps",
        {"response/useful_steps": "useful"},
        "%",
        "The others were spent on responses that had ended.",
      ),
      Chart("Responses", {"response/*": ""}, each=True),
    ),
  ),
  Subject(
    "Conversations",
    (
      Chart("Turns", {"conversation/turns": "mean"}, "responses"),
      Chart(
        "Use of tools",
        {
          "conversation/tool_use": "conversations with a call",
          "conversation/tool_errors": "calls that failed",
        },
        "%",
      ),
      Chart(
        "Tokens of a conversation",
        {
          "conversation/policy_tokens": "policy",
          "conversation/environment_tokens": "environment",
        },
        "tokens",
        "Those of the environment are read, not learnt from.",
      ),
      Chart("Other of conversations", {"conversation/*": ""}, each=True),
    ),
  ),
  Subject(
    "Size of the updates",
    (
      Chart(
        "Spread of the ratios",
        {"ratio/token_std": "of tokens", "ratio/sequence_std": "of responses"},
        log=True,
        note="Standard deviation of new / old probability.",
      ),
      Chart(
        "Responses clipped",
        {"clip_frac/sequence_low": "low", "clip_frac/sequence_high": "high"},
        "%",
        "Low: of negative advantage. High: of positive advantage.",
      ),
      Chart(
        "Tokens clipped",
        {"clip_frac/token_low": "low", "clip_frac/token_high": "high"},
        "%",
        "Share of all tokens of responses.",
      ),
      Spreads(
        {"ratio/token_log": "Log-ratios of tokens"},
        note="New over old policy.",
        clips="token",
      ),
      Spreads(
        {"ratio/sequence_log": "Log-ratios of responses"},
        note="New over old policy, mean over the tokens of a response.",
        clips="sequence",
      ),
      Chart("KL from old to new", {"kl/old_new": "old to new"}, "nats"),
      Chart("KL to the reference", {"kl/*": ""}, "nats"),
      Chart(
        "Ratios that changed",
        {"ratio/moved": "changed"},
        "%",
        "Tokens whose probability changed at all.",
      ),
      Numbers({"clip_frac/sequence": "", "clip_frac/token": ""}, "%"),
      Chart("Other clipping", {"clip_frac/*": ""}, "%", each=True),
      Chart("Other ratios", {"ratio/*": ""}, each=True),
    ),
  ),
  Subject(
    "Sampler and trainer",
    (
      Chart(
        "Difference for responses",
        {"mismatch/sequence_abs_mean": "of responses"},
        log=True,
        clips="sequence",
        note=_NOISE_NOTE,
      ),
      Spreads(
        {"mismatch/sequence_gap": "Differences for responses"},
        note="Trainer - sampler, mean over the tokens of a response.",
        clips="sequence",
      ),
      Chart(
        "Difference for tokens",
        {"mismatch/token_abs_mean": "of tokens"},
        log=True,
        clips="token",
        note=_NOISE_NOTE,
      ),
      Spreads(
        {"mismatch/token_gap": "Differences for tokens"},
        note="Trainer - sampler.",
        clips="token",
      ),
      Chart("Other differences", {"mismatch/*": ""}, each=True),
    ),
  ),
  Subject(
    "Stability",
    (
      Chart("Entropy", {"policy/entropy": "of a token"}, "nats"),
      Chart("Gradient norm", {"grad/norm": "before clipping"}, log=True),
      Chart("Policy loss", {"loss/policy": "loss"}),
      Chart("Losses", {"loss/*": ""}, each=True),
      Chart("Gradients", {"grad/*": ""}, log=True, each=True),
      Chart("Values", {"value/*": ""}, each=True),
      Chart("Policy", {"policy/*": ""}, each=True),
      Chart("Learning rate", {"optim/learning_rate": "rate"}),
    ),
  ),
  Subject(
    "Experts",
    (
      Chart(
        "Experts that flip",
        {"moe/expert_flip_rate": "all layers"},
        "%",
        "Expert choices in which the new policy differs from the old one.",
      ),
      Spreads({"moe/*flip*": "Flips by layer"}, "%"),
      Chart(
        "Load of the busiest expert",
        {"moe/load_max": "busiest"},
        note="1 is perfect balance.",
      ),
      Spreads({"moe/*load*": "Load of the busiest expert by layer"}),
      Chart("Router entropy", {"moe/router_entropy": "all layers"}, "nats"),
      Spreads({"moe/*entropy*": "Router entropy by layer"}, "nats"),
      Chart(
        "Router shift",
        {"moe/router_shift*": "ratio"},
        note="New / old probability of the chosen experts; 1 is no shift.",
      ),
      Spreads({"moe/*": ""}),
      Chart("Other numbers of experts", {"moe/*": ""}, each=True),
    ),
  ),
  Subject(
    "Time",
    (
      Chart(
        "Time of an iteration",
        {
          "time/generate": "generate",
          "time/score": "score",
          "time/update": "update",
          "time/iteration": "whole",
        },
        "s",
        "The first one compiles; the axis may not include it.",
        skip_first=True,
      ),
      Chart(
        "Tokens a second",
        {
          "throughput/sampler_tokens_per_second": "sampled",
          "throughput/tokens_per_second": "trained on",
        },
        note="Sampled: while generating. Trained on: over the whole iteration.",
      ),
      Chart(
        "Useful tokens of those computed",
        {
          "throughput/useful_fraction": "all",
          "throughput/useful_fraction_update": "update",
          "throughput/useful_fraction_score": "score",
          "throughput/useful_fraction_decode": "decode",
        },
        "%",
        "The others are padding, and decode steps of responses that had ended.",
      ),
      Chart("Passes over the problems", {"data/epochs": "epochs"}),
      Chart("Times", {"time/*": ""}, "s", skip_first=True, each=True),
    ),
  ),
  Subject(
    "Other metrics",
    (Chart("", {"*": ""}, each=True), Spreads({"*": ""})),
  ),
)


def matched(
  patterns: dict[str, str], names: Iterable[str], taken: set[str]
) -> dict[str, str]:
  """{name: label} of the metrics not yet taken, in the order of patterns."""
  labels = {}
  for pattern, label in patterns.items():
    for name in fnmatch.filter(sorted(names, key=_natural), pattern):
      if name not in taken | labels.keys():
        labels[name] = label or _label(name)
  return labels


def _label(name: str) -> str:
  label = (name.partition("/")[2] or name).replace("_", " ")
  return label if len(label) <= 16 else f"{label[:15]}…"


def _natural(name: str) -> list:
  """Sort key with pass@8 before pass@16."""
  head = name.rstrip("0123456789")
  return [head, int(name[len(head) :] or 0)]
