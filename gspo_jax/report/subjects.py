"""What a page shows, by subject: which metrics go into which chart."""

import fnmatch
from collections.abc import Iterable
from typing import NamedTuple


class Chart(NamedTuple):
  """A chart of one run; of several, one for each metric.

  Attributes:
    title: what is shown.
    metrics: patterns of metric names, and the labels of their lines; "": the
      last part of the name. A metric goes where it is matched first.
    unit: "%" for shares; else as it is written behind a number.
    note: how to read it.
    log: whether the axis shows decades.
    clips: "token" or "sequence": these log-ratios' sizes are shown, and where
      the method clips them is marked; "": nothing is.
    first_is_odd: the first step compiles.
    each: whether every metric gets a chart of its own.
    no_signal: how to read it if a run has steps without signal. Then it is a
      warning: it comes first, and is drawn even if it never changes.
  """

  title: str
  metrics: dict[str, str]
  unit: str = ""
  note: str = ""
  log: bool = False
  clips: str = ""
  first_is_odd: bool = False
  each: bool = False
  no_signal: str = ""


class Spreads(NamedTuple):
  """Distributions: patterns of names with their titles, "": the name.

  `clips`: as of a `Chart`, of the log-ratios themselves.
  """

  metrics: dict[str, str]
  unit: str = ""
  note: str = ""
  clips: str = ""


class Numbers(NamedTuple):
  """Metrics that stand in the table alone: sums of what charts show."""

  metrics: dict[str, str]
  unit: str = ""


class Subject(NamedTuple):
  title: str
  charts: tuple[Chart | Spreads | Numbers, ...]


_FLOOR = (
  "Mean |log-prob of the trainer less the sampler's|: rounding alone. With "
  "objective.old_logps=sampler it clips what lies above the clip range."
)

SUBJECTS = (
  Subject(
    "Does it learn?",
    (
      Chart(
        "Held-out accuracy",
        {"eval/pass@1": "sampled", "eval/greedy": "greedy"},
        "%",
        "Questions that it is never trained on.",
      ),
      Chart(
        "Reward",
        {"reward/mean": "mean"},
        note="Mean over the answers of an iteration, all parts together.",
      ),
      Chart(
        "Groups that teach",
        {"reward/mixed_groups": "mixed"},
        "%",
        "Equal rewards in a group give no advantage.",
        no_signal="No signal at 0%: the rewards of no group differed and gave "
        "no answer an advantage.",
      ),
      Chart(
        "One of k is right",
        {"eval/pass@*": ""},
        "%",
        "pass@k on the held-out questions.",
      ),
      Chart("Parts of the reward", {"reward/*": ""}),
      Numbers({"eval/avg@*": ""}, "%"),
      Chart("Evaluation", {"eval/*": ""}, "%", each=True),
    ),
  ),
  Subject(
    "How long does it answer?",
    (
      Chart("Length of an answer", {"response/length": "mean"}, "tokens"),
      Chart("Cut at the limit", {"response/truncated": "answers"}, "%"),
      Chart(
        "Decode steps of use",
        {"response/useful_steps": "of use"},
        "%",
        "The rest went into rows that had ended.",
      ),
      Chart("Answers", {"response/*": ""}, each=True),
    ),
  ),
  Subject(
    "How far does an update go?",
    (
      Chart(
        "Spread of the ratios",
        {"ratio/token_std": "of tokens", "ratio/sequence_std": "of answers"},
        log=True,
        note="Standard deviation of new over old probability.",
      ),
      Chart(
        "Answers clipped",
        {"clip_frac/sequence_low": "low", "clip_frac/sequence_high": "high"},
        "%",
        "Low: bad ones, pushed down enough. High: good ones, pushed up enough.",
      ),
      Chart(
        "Tokens clipped",
        {"clip_frac/token_low": "low", "clip_frac/token_high": "high"},
        "%",
        "Of all tokens of answers.",
      ),
      Spreads(
        {"ratio/token_log": "Log-ratios of tokens"},
        note="New over old policy.",
        clips="token",
      ),
      Spreads(
        {"ratio/sequence_log": "Log-ratios of answers"},
        note="New over old policy, the mean over an answer's tokens.",
        clips="sequence",
      ),
      Chart("KL from old to new", {"kl/old_new": "old to new"}, "nats"),
      Chart("KL to the reference", {"kl/*": ""}, "nats"),
      Chart(
        "Ratios that moved",
        {"ratio/moved": "moved"},
        "%",
        "Tokens whose probability changed at all.",
      ),
      Numbers({"clip_frac/sequence": "", "clip_frac/token": ""}, "%"),
      Chart("Other clipping", {"clip_frac/*": ""}, "%", each=True),
      Chart("Other ratios", {"ratio/*": ""}, each=True),
    ),
  ),
  Subject(
    "Do sampler and trainer agree?",
    (
      Chart(
        "Noise floor of answers",
        {"mismatch/sequence_abs_mean": "of answers"},
        log=True,
        clips="sequence",
        note=_FLOOR,
      ),
      Spreads(
        {"mismatch/sequence_gap": "Gaps of answers"},
        note="Trainer less sampler, the mean over an answer's tokens.",
        clips="sequence",
      ),
      Chart(
        "Noise floor of tokens",
        {"mismatch/token_abs_mean": "of tokens"},
        log=True,
        clips="token",
        note=_FLOOR,
      ),
      Spreads(
        {"mismatch/token_gap": "Gaps of tokens"},
        note="Trainer less sampler.",
        clips="token",
      ),
      Chart("Sampler and trainer", {"mismatch/*": ""}, each=True),
    ),
  ),
  Subject(
    "Is it healthy?",
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
    "What do the experts do?",
    (
      Chart(
        "Experts that flip",
        {"moe/expert_flip_rate": "all layers"},
        "%",
        "Choices that the new policy makes otherwise than the old one.",
      ),
      Spreads({"moe/*flip*": "Flips by layer"}, "%"),
      Chart(
        "Load of the busiest expert",
        {"moe/load_max": "busiest"},
        note="1 is balance.",
      ),
      Spreads({"moe/*load*": "Load of the busiest expert by layer"}),
      Chart("Router entropy", {"moe/router_entropy": "all layers"}, "nats"),
      Spreads({"moe/*entropy*": "Router entropy by layer"}, "nats"),
      Chart(
        "Router shift",
        {"moe/router_shift*": "ratio"},
        note="New over old probability of the chosen experts; 1 is none.",
      ),
      Spreads({"moe/*": ""}),
      Chart("Experts", {"moe/*": ""}, each=True),
    ),
  ),
  Subject(
    "Where does the time go?",
    (
      Chart(
        "Seconds an iteration",
        {
          "time/generate": "generate",
          "time/score": "score",
          "time/update": "update",
          "time/iteration": "whole",
        },
        "s",
        "The first one compiles; the axis may cut it off.",
        first_is_odd=True,
      ),
      Chart(
        "Tokens a second",
        {
          "throughput/sampler_tokens_per_second": "drawn",
          "throughput/tokens_per_second": "learnt from",
        },
        note="Drawn: while generating. Learnt from: over the whole iteration.",
      ),
      Chart("Passes over the questions", {"data/epochs": "epochs"}),
      Chart("Times", {"time/*": ""}, "s", first_is_odd=True, each=True),
    ),
  ),
  Subject(
    "Everything else",
    (Chart("", {"*": ""}, each=True), Spreads({"*": ""})),
  ),
)


def matched(
  patterns: dict[str, str], names: Iterable[str], taken: set[str]
) -> dict[str, str]:
  """{name: label} of those not yet taken, in the order of the patterns."""
  found = {}
  for pattern, label in patterns.items():
    for name in fnmatch.filter(sorted(names, key=_natural), pattern):
      if name not in taken | found.keys():
        found[name] = label or _label(name)
  return found


def _label(name: str) -> str:
  label = (name.partition("/")[2] or name).replace("_", " ")
  return label if len(label) <= 16 else f"{label[:15]}…"


def _natural(name: str) -> list:
  """pass@8 before pass@16."""
  head = name.rstrip("0123456789")
  return [head, int(name[len(head) :] or 0)]
