"""Losses and advantages as in their papers: loops over float64 numbers."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

B, T = 6, 9


class Case(NamedTuple):
  """The arguments of a loss; each [B, T], but `a` may be [B]."""

  x: np.ndarray
  o: np.ndarray
  a: np.ndarray
  m: np.ndarray
  router_shift: np.ndarray | None = None
  shift: np.ndarray | None = None
  weights: np.ndarray | None = None
  reference: np.ndarray | None = None  # the penalty is (x - reference)^2 / 2
  penalty: Callable | None = None  # or this function of x, row and token


# Name: (the paper's clip bounds, a std of x - o that clips some tokens).
SETTINGS = {
  "gspo": ((3e-4, 4e-4), 1e-3), "gspo_token": ((3e-4, 4e-4), 1e-3),
  "grpo": ((0.2, 0.27), 0.4), "dr_grpo": ((0.2, 0.2), 0.4),
  "dapo": ((0.2, 0.28), 0.4), "ppo": ((0.2, 0.2), 0.4),
  "gmpo": ((0.4, 0.4), 0.6), "rspo": ((0.4, 0.4), 0.6), "cispo": ((5.0,), 1.5),
  "sapo": ((1.0, 1.05), 0.6), "luspo": ((2e-3, 2.5e-3), 6e-3),
  "vespo": ((2.0, 3.0, 3.0, 2.0), 0.3), "dppo_tv": ((0.2,), 1.5),
  "dppo_kl": ((0.05,), 1.0), "ctpo": ((0.025, 0.05), 0.06),
}  # fmt: skip
PER_SEQUENCE = ("gspo", "gmpo", "rspo", "luspo")  # take [B] advantages only
OVER_TOKENS = ("dapo", "ppo", "cispo", "vespo")
FIXED_LENGTH = ("dr_grpo", "dppo_tv", "dppo_kl")
SEQUENCE_RATIO = ("gspo", "gspo_token", "luspo", "vespo")
SMOOTH = ("sapo", "vespo")  # clip nothing
# Refuse a dual clip.
UNCLIPPED = (
  *("gmpo", "rspo", "cispo", "sapo"),
  *("vespo", "dppo_tv", "dppo_kl", "ctpo"),
)


def random_case(name, seed=0, per_token=False, extreme=False) -> Case:
  """A ragged mask; `extreme` adds log-ratios of ±50, beyond the clamp."""
  rng = np.random.default_rng(seed)
  mask = (np.arange(T) < rng.integers(4, T + 1, B)[:, None]) & (
    rng.random((B, T)) < 0.8
  )
  mask[0], mask[1], mask[2] = True, False, np.arange(T) == 3
  old = rng.uniform(-5, -0.1, (B, T)).astype(np.float32)
  gap = SETTINGS[name][1] * rng.standard_normal((B, T))
  if extreme:
    gap[rng.random((B, T)) < 0.3] = 50
    gap[rng.random((B, T)) < 0.3] = -50
  advantages = rng.standard_normal((B, T) if per_token else B)
  shift = rng.exponential(0.2, (B, T)).astype(np.float32)
  return Case(
    (old + gap).astype(np.float32),
    old,
    advantages.astype(np.float32),
    mask,
    router_shift=shift if name == "rspo" else None,
  )


class Token(NamedTuple):
  log: float  # x - o with all shifts, clamped
  fixed: float  # the same, for what stands in a stop_gradient
  x: float
  o: float
  a: float


def clipped(ratio, a, bounds, dual_clip):
  low, high = bounds
  free, bound = ratio * a, min(max(ratio, 1 - low), 1 + high) * a
  value = min(free, bound)
  dual = dual_clip is not None and a < 0 and dual_clip * a > value
  if dual:
    value = dual_clip * a
  cut = bound < free
  return -value, cut and ratio < 1, (cut and ratio > 1) or dual


def gspo(tokens, bounds, dual_clip):
  s = math.exp(sum(t.log for t in tokens) / len(tokens))
  return [clipped(s, t.a, bounds, dual_clip) for t in tokens]


def gspo_token(tokens, bounds, dual_clip):
  s = math.exp(sum(t.fixed for t in tokens) / len(tokens))
  return [
    clipped(s * math.exp(t.log - t.fixed), t.a, bounds, dual_clip)
    for t in tokens
  ]


def grpo(tokens, bounds, dual_clip):
  return [clipped(math.exp(t.log), t.a, bounds, dual_clip) for t in tokens]


def gmpo(tokens, bounds, dual_clip):
  low, high = bounds
  product, cuts = 1.0, []
  for t in tokens:
    ratio = math.exp(t.log)
    if t.a > 0:
      kept = min(ratio, math.exp(high))
    elif t.a < 0:
      kept = max(ratio, math.exp(-low))
    else:
      kept = ratio
    cuts.append((kept > ratio, kept < ratio))
    product *= kept
  mean = product ** (1 / len(tokens))
  return [(-mean * t.a, *cut) for t, cut in zip(tokens, cuts, strict=True)]


def cispo(tokens, bounds, dual_clip):
  (cap,) = bounds
  ratios = [math.exp(t.fixed) for t in tokens]
  return [
    (-min(r, cap) * t.a * t.x, False, r > cap and t.a != 0)
    for r, t in zip(ratios, tokens, strict=True)
  ]


def sapo(tokens, bounds, dual_clip):
  rows = []
  for t in tokens:
    tau = bounds[0] if t.a > 0 else bounds[1]
    # tanh, as the exp of a sigmoid overflows.
    gate = (1 + math.tanh(tau * (math.exp(t.log) - 1) / 2)) / 2
    rows.append((-4 / tau * gate * t.a, False, False))
  return rows


def vespo(tokens, bounds, dual_clip):
  w = math.exp(clamp(sum(t.fixed for t in tokens)))
  rows = []
  for t in tokens:
    k, rate = bounds[:2] if t.a > 0 else bounds[2:]
    rows.append((-(w**k) * math.exp(rate * (1 - w)) * t.a * t.x, False, False))
  return rows


def total_variation(p, q, gap):
  return abs(p - q)


def binary_kl(p, q, gap):
  others = [max(1 - prob, 2.0**-24) for prob in (p, q)]
  return -q * gap + others[1] * math.log(others[1] / others[0])


def dppo(divergence):
  def losses(tokens, bounds, dual_clip):
    (delta,) = bounds
    rows = []
    for t in tokens:
      gap = clamp(t.x - t.o)
      far = divergence(math.exp(t.x), math.exp(t.o), gap) > delta
      low, high = far and t.a < 0 and gap < 0, far and t.a > 0 and gap > 0
      loss = 0.0 if low or high else -math.exp(t.log) * t.a
      rows.append((loss, low, high))
    return rows

  return losses


def ctpo(tokens, bounds, dual_clip):
  rows, total = [], 0.0
  for step, t in enumerate(tokens, start=1):
    total += t.fixed
    ratio = math.exp(clamp(total) + t.log - t.fixed)
    low, high = (bound * math.sqrt(step) for bound in bounds)
    window = 1 - math.exp(-low), math.exp(high) - 1
    rows.append(clipped(ratio, t.a, window, None))
  return rows


METHODS = {
  **dict.fromkeys(("grpo", "dr_grpo", "dapo", "ppo"), grpo),
  **dict.fromkeys(("gmpo", "rspo"), gmpo),
  **dict.fromkeys(("gspo", "luspo"), gspo),
  **{f.__name__: f for f in (gspo_token, cispo, sapo, vespo, ctpo)},
  **{"dppo_tv": dppo(total_variation), "dppo_kl": dppo(binary_kl)},
}


def clamp(gap):
  return max(-20.0, min(20.0, gap))


def rows_of(name, case: Case, x_fixed, dual_clip=None, bounds=None, floor=0.8):
  """A dict of lists for each row; `x_fixed` is x inside stop_gradient."""
  bounds = bounds or SETTINGS[name][0]
  x, o, a, x_fixed = (
    np.asarray(v, float) for v in (case.x, case.o, case.a, x_fixed)
  )
  rows = []
  for i in range(len(x)):
    steps = [t for t in range(x.shape[1]) if case.m[i, t]]
    if not steps:
      continue
    tokens, penalty = [], []
    for t in steps:
      shift = 0.0 if case.shift is None else float(case.shift[i, t])
      if case.router_shift is not None:
        weight = max(math.exp(-float(case.router_shift[i, t])), floor)
        shift += math.log(weight)
      tokens.append(
        Token(
          clamp(x[i, t] - o[i, t] + shift),
          clamp(x_fixed[i, t] - o[i, t] + shift),
          x[i, t],
          o[i, t],
          a[i] if a.ndim == 1 else a[i, t],
        )
      )
      if case.reference is not None:
        penalty.append((x[i, t] - float(case.reference[i, t])) ** 2 / 2)
      elif case.penalty is not None:
        penalty.append(case.penalty(x[i, t], i, t))
    losses, low, high = zip(
      *METHODS[name](tokens, bounds, dual_clip), strict=True
    )
    if case.weights is not None:
      weights = [float(case.weights[i, t]) for t in steps]
      losses = [w * v for w, v in zip(weights, losses, strict=True)]
    rows.append(
      {
        "loss": losses,
        "low": low,
        "high": high,
        "penalty": penalty or [0.0] * len(steps),
        "gap": [clamp(x[i, t] - o[i, t]) for t in steps],
      }
    )
  return rows


def mean_over_rows(rows, key):
  return np.mean([np.mean(row[key]) for row in rows])


def over_tokens(rows, key):
  return np.concatenate([row[key] for row in rows])


def aggregated(name, rows, key, max_length):
  if name in FIXED_LENGTH:
    return over_tokens(rows, key).sum() / (len(rows) * max_length)
  if name == "luspo":
    return over_tokens(rows, key).sum() / len(rows)
  if name in OVER_TOKENS:
    return over_tokens(rows, key).mean()
  return mean_over_rows(rows, key)


def loss(name, case: Case, dual_clip=None, **options):
  """(the loss, its metrics by name); `options` as of `rows_of`."""
  rows = rows_of(name, case, case.x, dual_clip, **options)
  low, high = over_tokens(rows, "low"), over_tokens(rows, "high")
  rows_low, rows_high = (mean_over_rows(rows, k) for k in ("low", "high"))
  gap = over_tokens(rows, "gap")
  row_gap = np.array([np.mean(row["gap"]) for row in rows])
  policy, penalty = (
    aggregated(name, rows, key, case.x.shape[1]) for key in ("loss", "penalty")
  )
  metrics = {
    "loss/policy": policy,
    "ratio/sequence_std": np.std(np.exp(row_gap)),
    "ratio/token_std": np.std(np.exp(gap)),
    "ratio/sequence_log": row_gap,
    "ratio/token_log": gap,
    "ratio/moved": np.mean(gap != 0),
    "kl/old_new": np.mean(np.exp(gap) - 1 - gap),
    "clip_frac/token": (low | high).mean(),
    "clip_frac/token_low": low.mean(),
    "clip_frac/token_high": high.mean(),
    "clip_frac/sequence": rows_low + rows_high,
    "clip_frac/sequence_low": rows_low,
    "clip_frac/sequence_high": rows_high,
  }
  if case.reference is not None:
    metrics["loss/penalty"] = penalty
  return policy + penalty, metrics


def gradient(name, case: Case, dual_clip=None, step=1e-6, **options):
  """Central differences of each token's loss, then summed: less rounding."""
  grad = np.zeros(case.x.shape)
  for index in zip(*np.nonzero(case.m), strict=True):
    nudge = np.zeros(case.x.shape)
    nudge[index] = step
    above, below = (
      rows_of(name, case._replace(x=case.x + d), case.x, dual_clip, **options)
      for d in (nudge, -nudge)
    )
    change = [
      {
        "change": np.subtract(p["loss"], q["loss"])
        + np.subtract(p["penalty"], q["penalty"])
      }
      for p, q in zip(above, below, strict=True)
    ]
    slope = aggregated(name, change, "change", case.x.shape[1])
    grad[index] = slope / (2 * step)
  return grad


def mismatch_weights(old, sampled, mask, method, unit, cap, floor):
  """(weights, the fraction out of bounds, the mean weight)."""
  weights, cuts = np.zeros(mask.shape), []
  for i in range(len(mask)):
    steps = np.flatnonzero(mask[i])
    logs = [float(old[i, t]) - float(sampled[i, t]) for t in steps]
    logs = [max(-20, min(20, log)) for log in logs]
    if unit == "sequence" and logs:
      logs = [sum(logs) / len(logs)] * len(logs)
    for t, log in zip(steps, logs, strict=True):
      ratio = math.exp(log)
      if method == "tis":
        weights[i, t] = min(ratio, cap)
        cuts.append(ratio > cap)
      else:
        inside = floor <= ratio <= cap
        weights[i, t] = ratio if inside else 0
        cuts.append(not inside)
  return weights, np.mean(cuts), weights.sum() / len(cuts)


def off_policy_mask(x, sampled, a, mask, threshold):
  """(weights, the fraction of tokens that are masked); `a` is [B, T]."""
  weights = mask.astype(float)
  for i in range(len(mask)):
    gaps = [float(sampled[i, t] - x[i, t]) for t in np.flatnonzero(mask[i])]
    if gaps and sum(map(clamp, gaps)) / len(gaps) > threshold:
      weights[i, a[i] < 0] = 0
  return weights, 1 - weights.sum() / mask.sum()


def value_loss(values, old, returns, mask, clip=0.2):
  """[B, T] each: losses, whether they are clipped, slopes."""
  losses, cuts = np.zeros(mask.shape), np.zeros(mask.shape, bool)
  grad = np.zeros(mask.shape)
  for i, t in zip(*np.nonzero(mask), strict=True):
    v, o, r = (float(x[i, t]) for x in (values, old, returns))
    near = min(max(v, o - clip), o + clip)
    free, bound = (v - r) ** 2, (near - r) ** 2
    losses[i, t] = max(free, bound) / 2
    cuts[i, t] = bound > free
    # The clipped error is larger and does not change with v.
    grad[i, t] = 0 if bound > free else v - r
  return losses, cuts, grad


def generalized_advantages(rewards, values, mask, discount, trace_decay):
  """[B, T]: sum_k (g l)^k d_t+k over response tokens; g, l: the arguments."""
  expected = np.zeros(mask.shape)
  for i in range(len(mask)):
    tokens = np.flatnonzero(mask[i])
    r, v = (x[i, tokens].astype(float) for x in (rewards, values))
    v = np.append(v, 0.0)
    deltas = [r[k] + discount * v[k + 1] - v[k] for k in range(len(tokens))]
    for k, t in enumerate(tokens):
      expected[i, t] = sum(
        (discount * trace_decay) ** (j - k) * deltas[j]
        for j in range(k, len(tokens))
      )
  return expected
