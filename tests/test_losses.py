"""Losses against loops in float64, and the properties they promise."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspo_jax
from gspo_jax.losses import Mean, Std

# Name: clips, and a spread of x - o that clips some tokens and not others.
LOSSES = {
  "gspo": (3e-4, 4e-4, 1e-3),
  "gspo_token": (3e-4, 4e-4, 1e-3),
  "grpo": (0.2, 0.27, 0.4),
  "dr_grpo": (0.2, 0.2, 0.4),
  "dapo": (0.2, 0.28, 0.4),
}
B, T = 6, 9
every_loss = pytest.mark.parametrize("name", LOSSES)


def loss_of(name):
  return getattr(gspo_jax, f"{name}_loss")


@functools.cache
def compiled(name, **static):
  f = functools.partial(loss_of(name), **static)
  return jax.jit(jax.value_and_grad(f, has_aux=True))


def run(name, data, static=(), **arrays):
  (loss, metrics), grad = compiled(name, **dict(static))(*data, **arrays)
  return np.asarray(loss), jax.device_get(metrics), np.asarray(grad)


def draw(name, seed=0, per_token=False, extreme=False):
  """x, o, A, m: ragged, with holes, an empty row and a row of one token."""
  rng = np.random.default_rng(seed)
  mask = (np.arange(T) < rng.integers(4, T + 1, B)[:, None]) & (
    rng.random((B, T)) < 0.8
  )
  mask[0], mask[1], mask[2] = True, False, np.arange(T) == 3
  old = rng.uniform(-5, -0.1, (B, T)).astype(np.float32)
  shift = LOSSES[name][2] * rng.standard_normal((B, T))
  if extreme:
    shift[rng.random((B, T)) < 0.3] = 50
    shift[rng.random((B, T)) < 0.3] = -50
  advantages = rng.standard_normal((B, T) if per_token else B)
  logps = (old + shift).astype(np.float32)
  return logps, old, advantages.astype(np.float32), mask


def wide(data):
  x, o, a, m = data
  return x, o, np.broadcast_to(a[:, None], m.shape), m


def rows_of(name, x, o, a, m, x_fixed):
  """The tables of the papers as loops; `x_fixed` stands in stop-gradients."""
  low, high, _ = LOSSES[name]
  x, o, a, x_fixed = (v.astype(np.float64) for v in (x, o, a, x_fixed))
  rows = []
  for i in range(len(x)):
    row = {k: [] for k in ("loss", "low", "high", "ratio", "kl", "moved")}
    steps = [t for t in range(x.shape[1]) if m[i, t]]
    now = [max(-20.0, min(20.0, x[i, t] - o[i, t])) for t in steps]
    fixed = [max(-20.0, min(20.0, x_fixed[i, t] - o[i, t])) for t in steps]
    for t, log, log_fixed in zip(steps, now, fixed, strict=True):
      ratio = np.exp(log)
      row["ratio"].append(ratio)
      row["kl"].append(ratio - 1 - log)
      row["moved"].append(x[i, t] != o[i, t])
      if name == "gspo":
        ratio = np.exp(sum(now) / len(now))
      if name == "gspo_token":
        ratio = np.exp(sum(fixed) / len(fixed)) * np.exp(log - log_fixed)
      advantage = a[i] if a.ndim == 1 else a[i, t]
      free = ratio * advantage
      bound = min(max(ratio, 1 - low), 1 + high) * advantage
      row["loss"].append(-min(free, bound))
      row["low"].append(bound < free and ratio < 1)
      row["high"].append(bound < free and ratio > 1)
    if steps:
      row["sequence"] = np.exp(sum(now) / len(now))
      rows.append(row)
  return rows


def mean_over_rows(rows, key):
  return np.mean([np.mean(row[key]) for row in rows])


def over_tokens(rows, key):
  return np.concatenate([row[key] for row in rows])


def aggregated(name, rows, max_length):
  if name == "dr_grpo":
    return over_tokens(rows, "loss").sum() / (len(rows) * max_length)
  if name == "dapo":
    return over_tokens(rows, "loss").mean()
  return mean_over_rows(rows, "loss")


def oracle(name, x, o, a, m):
  rows = rows_of(name, x, o, a, m, x)
  low, high = over_tokens(rows, "low"), over_tokens(rows, "high")
  rows_low, rows_high = (mean_over_rows(rows, k) for k in ("low", "high"))
  loss = aggregated(name, rows, x.shape[1])
  return loss, {
    "loss/policy": loss,
    "ratio/sequence_std": np.std([row["sequence"] for row in rows]),
    "ratio/token_std": np.std(over_tokens(rows, "ratio")),
    "ratio/moved": over_tokens(rows, "moved").mean(),
    "kl/old_new": over_tokens(rows, "kl").mean(),
    "clip_frac/token": (low | high).mean(),
    "clip_frac/token_low": low.mean(),
    "clip_frac/token_high": high.mean(),
    "clip_frac/sequence": rows_low + rows_high,
    "clip_frac/sequence_low": rows_low,
    "clip_frac/sequence_high": rows_high,
  }


def slopes(name, x, o, a, m, step=1e-6):
  """Central differences, of the terms: a sum would round off the small ones."""
  grad = np.zeros(x.shape)
  for index in zip(*np.nonzero(m), strict=True):
    nudge = np.zeros(x.shape)
    nudge[index] = step
    above, below = (rows_of(name, x + d, o, a, m, x) for d in (nudge, -nudge))
    change = [
      {"loss": np.subtract(p["loss"], q["loss"])}
      for p, q in zip(above, below, strict=True)
    ]
    grad[index] = aggregated(name, change, x.shape[1]) / (2 * step)
  return grad


def assert_close(got, expected, rtol=2e-5):
  # 1e-7: terms of either sign and of size 1 may add up to almost nothing.
  atol = 1e-7 + rtol * np.max(np.abs(expected))
  np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


def assert_same(got, expected):
  """Two results of `run`, up to the order of float32 sums."""
  jax.tree.map(functools.partial(assert_close, rtol=3e-6), got, expected)


@every_loss
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_value_gradient_metrics_are_the_oracles(name, seed, extreme):
  data = draw(name, seed, extreme=extreme)
  loss, metrics, grad = run(name, data)
  expected, values = oracle(name, *data)
  assert_close(loss, expected)
  assert_close(grad, slopes(name, *data))
  assert metrics.keys() == values.keys()
  assert_close(metrics.pop("loss/policy").value(), expected)
  for key, metric in metrics.items():
    # These two are what is left over from a difference.
    rtol = {"kl/old_new": 1e-3}.get(key, 1e-4 if "std" in key else 2e-6)
    np.testing.assert_allclose(metric.value(), values[key], rtol)


@every_loss
def test_oracle_data_clips_some_and_not_all(name):
  fractions = [
    run(name, draw(name, seed))[1][f"clip_frac/token_{side}"].value()
    for seed in range(4)
    for side in ("low", "high")
  ]
  assert 0.05 < np.mean(fractions) < 0.45


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "gspo"])
def test_advantages_of_tokens(name):
  data = draw(name, per_token=True)
  expected, _ = oracle(name, *data)
  loss, _, grad = run(name, data)
  assert_close(loss, expected)
  assert_close(grad, slopes(name, *data))


@every_loss
def test_advantage_of_a_sequence_is_that_of_its_tokens(name):
  data = draw(name)
  ids = {"segment_ids": np.zeros((B, T), int)} if name == "gspo" else {}
  assert_same(run(name, wide(data), **ids), run(name, data))


@every_loss
def test_garbage_under_the_mask_is_never_read(name):
  x, o, a, m = wide(draw(name))
  ids = np.zeros((B, T), np.int32)
  clean = run(name, (x, o, a, m), segment_ids=ids)
  for seed in range(3):
    rng = np.random.default_rng(seed)
    junk = rng.choice([np.nan, np.inf, -np.inf, 1e30], (3, B, T))
    dirty = np.where(m, [x, o, a], junk).astype(np.float32)
    stray = np.where(m, ids, rng.choice([-1, T, 10**9], (B, T)))
    result = run(name, (*dirty, m), segment_ids=stray.astype(np.int32))
    jax.tree.map(np.testing.assert_array_equal, result, clean)
    assert not result[2][~m].any()


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_garbage_under_the_mask_passes_debug_nans(junk):
  x, o, a, m = wide(draw("gspo"))
  dirty = np.where(m, [x, o, a], junk).astype(np.float32)
  ids = np.where(m, 0, 10**9)
  f = functools.partial(gspo_jax.gspo_loss, segment_ids=ids)
  with jax.debug_nans(True):
    jax.grad(f, has_aux=True)(*dirty, m)


@every_loss
def test_garbage_advantage_of_an_empty_row(name):
  x, o, a, m = draw(name)
  expected = run(name, (x, o, a, m))
  result = run(name, (x, o, np.where(m.any(1), a, np.float32("nan")), m))
  jax.tree.map(np.testing.assert_array_equal, result, expected)


@every_loss
def test_empty_batch(name):
  x, o, a, m = draw(name)
  loss, metrics, grad = run(name, (x, o, a, np.zeros_like(m)))
  assert loss == 0
  assert not grad.any()
  assert all(np.isnan(metric.value()) for metric in metrics.values())


@every_loss
def test_microbatches_add_up(name):
  data = draw(name)
  loss, metrics, grad = run(name, data)
  parts = [
    run(name, [v[i : i + 2] for v in data], normalizer=np.float32(1))
    for i in range(0, B, 2)
  ]
  total = functools.reduce(
    lambda a, b: jax.tree.map(np.add, a, b), [part[:2] for part in parts]
  )
  assert_same(total[1], metrics)
  count = total[1]["loss/policy"].count
  assert_same(total[0] / count, loss)
  assert_same(np.concatenate([part[2] for part in parts]) / count, grad)


@every_loss
def test_normalizer_replaces_the_denominator_only(name):
  data = draw(name)
  loss, metrics, grad = run(name, data)
  other, other_metrics, other_grad = run(name, data, normalizer=np.float32(2))
  assert_same(other_metrics, metrics)
  count = metrics["loss/policy"].count
  assert_same((other * 2 / count, other_grad * 2 / count), (loss, grad))
  natural = {"dapo": data[3].sum(), "dr_grpo": 5 * T}.get(name, 5)
  assert count == natural


def pack(array):
  """[B, T] -> [B / 2, 2 T], two sequences a row, their tokens interleaved."""
  array = np.reshape(array, (B // 2, 2 * T))
  orders = [np.random.default_rng(i).permutation(2 * T) for i in range(B // 2)]
  return np.stack([row[o] for row, o in zip(array, orders, strict=True)])


@every_loss
def test_packed_rows_are_the_unpacked_ones(name):
  static = {"max_length": 7}.items() if name == "dr_grpo" else ()
  loss, metrics, grad = run(name, draw(name), static)
  data = [pack(v) for v in wide(draw(name))]
  ids = pack(np.arange(B)[:, None] % 2 * (2 * T - 1) + np.zeros((B, T), int))
  result = run(name, data, static, segment_ids=ids)
  assert_same(result, (loss, metrics, pack(grad)))


@every_loss
def test_order_of_rows_does_not_matter(name):
  data = draw(name)
  order = np.random.default_rng(0).permutation(B)
  loss, metrics, grad = run(name, data)
  result = run(name, [v[order] for v in data])
  assert_same(result, (loss, metrics, grad[order]))


@every_loss
def test_one_token_answers(name):
  data = [v[..., :1] if v.ndim == 2 else v for v in draw(name)]
  expected, _ = oracle(name, *data)
  loss, _, grad = run(name, data)
  assert_close(loss, expected)
  assert_close(grad, slopes(name, *data))


@every_loss
def test_only_new_log_probs_have_a_gradient(name):
  x, o, a, m = draw(name)

  def everything(*floats):
    loss, metrics = loss_of(name)(*floats, m)
    return loss, sum(metric.total for metric in metrics.values())

  of_loss, of_metrics = jax.jit(jax.jacrev(everything, (0, 1, 2)))(x, o, a)
  assert [bool(grad.any()) for grad in of_loss] == [True, False, False]
  assert not any(grad.any() for grad in of_metrics)


@pytest.mark.parametrize("extreme", [False, True])
def test_gspo_is_gspo_token_for_constant_advantages(extreme):
  data = draw("gspo", extreme=extreme)
  assert_same(run("gspo_token", data), run("gspo", data))


def test_gspo_is_not_gspo_token_for_advantages_of_tokens():
  data = draw("gspo", per_token=True)
  ids = {"segment_ids": np.zeros((B, T), int)}
  loss, _, grad = run("gspo", data, **ids)
  token_loss, _, token_grad = run("gspo_token", data, **ids)
  assert_same(loss, token_loss)
  assert np.max(np.abs(grad - token_grad)) > 0.01
  assert_close(grad, slopes("gspo", *data))
  assert_close(token_grad, slopes("gspo_token", *data))


@every_loss
def test_zero_advantages_are_never_clipped(name):
  x, o, a, m = draw(name, extreme=True)
  loss, metrics, grad = run(name, (x, o, np.zeros_like(a), m))
  assert loss == 0
  assert not grad.any()
  fractions = [v for key, v in metrics.items() if key.startswith("clip_frac")]
  assert not any(fraction.value() for fraction in fractions)


@every_loss
def test_on_policy_ratio_is_exactly_one(name):
  _, o, a, m = draw(name)
  loss, metrics, grad = run(name, (o, o, a, m))
  assert_close(loss, oracle(name, o, o, a, m)[0])
  assert grad.any()
  for key in ("ratio/moved", "ratio/token_std", "clip_frac/token"):
    assert metrics[key].value() == 0


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_masks_of_numbers(dtype):
  x, o, a, m = draw("gspo")
  result = run("gspo", (x, o, a, m.astype(dtype)))
  assert_same(result, run("gspo", (x, o, a, m)))


@every_loss
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_other_floats_are_refused(name, which, dtype):
  data = list(draw(name))
  data[which] = data[which].astype(dtype)
  argument = ["logps", "old_logps", "advantages"][which]
  with pytest.raises(TypeError, match=f"^{argument} must be float32"):
    loss_of(name)(*data)


@every_loss
def test_wrong_shapes_are_refused(name):
  x, o, a, m = draw(name)
  ids = np.zeros((B, T), int)
  bad = [
    ((x, o[:, 1:], a, m), {}, r"\(6, 8\)"),
    ((x, o, a, m[1:]), {}, r"\(5, 9\)"),
    ((x[0], o[0], a[0], m[0]), {}, r"\[B"),
    ((x, o, a[1:], m), {}, r"\(5,\)"),
    ((x, o, wide((x, o, a, m))[2], m), {"segment_ids": ids[1:]}, r"\(5, 9\)"),
    ((x, o, a, m), {"segment_ids": ids}, r"\(6,\), packed=True"),
  ]
  for arguments, keywords, message in bad:
    with pytest.raises(ValueError, match=message):
      loss_of(name)(*arguments, **keywords)


def test_gspo_refuses_advantages_of_tokens():
  with pytest.raises(ValueError, match="gspo_token_loss takes"):
    gspo_jax.gspo_loss(*draw("gspo", per_token=True))


@pytest.mark.parametrize("scalar", [float, np.float32, jnp.float32])
def test_values_of_metrics(scalar):
  assert Mean(scalar(6), scalar(4)).value() == 1.5
  assert Std(scalar(4), scalar(10), scalar(2)).value() == 1.0
  assert np.isnan(Mean(scalar(0), scalar(0)).value())
  assert np.isnan(Std(scalar(0), scalar(0), scalar(0)).value())


def test_import_is_light_and_touches_no_device():
  heavy = "flax orbax grain transformers tensorflow optax ml_collections"
  code = f"""
import sys, gspo_jax
assert not [name for name in {heavy.split()} if name in sys.modules]
import jax
try:
  jax.devices()
except RuntimeError:
  print("the first touch of a device fails")
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | {"JAX_PLATFORMS": "nowhere"},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert "first touch" in done.stdout, done.stderr
