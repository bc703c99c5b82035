# %% [markdown]
# # GSPO's loss, from scratch
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/gspo-jax/gspo_jax/blob/main/colabs/loss.ipynb)
#
# GRPO puts an importance ratio on every token. GSPO puts one on the whole
# response, the geometric mean of the token ratios, and clips there ([arXiv
# 2507.18071](https://arxiv.org/abs/2507.18071)). Below: both losses in a few
# lines, what the length normalisation does to a ratio, what gradient each token
# of a batch gets, and `gspo_loss` in a training loop that uses nothing else of
# this package. Half a minute on a CPU.
#
# The package takes Qwen2, Qwen2.5, Qwen3, Qwen3-Next, Qwen3.5 and Qwen3.6, dense
# and MoE; DeepSeek-V3, Moonlight and Kimi K2; GLM-4.5 to 4.7, GLM-4.7-Flash,
# MiniMax-M2, gpt-oss, Llama 3, SmolLM2, OLMoE, Mixtral, Mistral, Phi-4,
# SmolLM3, Seed-OSS, dots1, InternLM3, IQuest-Coder and Sarvam; and, for texts,
# Qwen2.5-VL, Qwen3-VL and Mistral Small 3.1 and later
# ([your model](https://github.com/gspo-jax/gspo_jax/blob/main/docs/your_model.md)).

# %%
# Installs what this machine needs, and says what it has. GSPO_JAX names another
# source of the package.
import importlib.util
import os
import subprocess
import sys

if not importlib.util.find_spec("gspo_jax"):
  repository = "git+https://github.com/gspo-jax/gspo_jax"
  package = f"gspo_jax @ {os.environ.get('GSPO_JAX', repository)}"
  command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", package]
  subprocess.run(command, check=True)
  importlib.invalidate_caches()

from gspo_jax.runtime import notebook

DTYPE = notebook.prepare()

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from gspo_jax import group_relative_advantages, grpo_loss, gspo_loss

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.25, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.dpi": 100})
GSPO, GRPO, PRODUCT = "C0", "C1", "C3"

# %% [markdown]
# ## Both losses in a few lines
#
# `logps` and `old_logps` are log-probs of the tokens of `B` responses under the
# new and the old policy, `[B, T]`; the mask says where a response has tokens.


# %%
def clipped(ratio, advantages, low, high):
  bounded = jnp.clip(ratio, 1 - low, 1 + high)
  return -jnp.minimum(ratio * advantages, bounded * advantages)


def token_means(x, mask):
  return jnp.where(mask, x, 0).sum(1) / mask.sum(1)


def my_gspo(logps, old_logps, advantages, mask, low=3e-4, high=4e-4):
  ratio = jnp.exp(token_means(logps - old_logps, mask))  # [B]: one a response
  return clipped(ratio, advantages, low, high).mean()


def my_grpo(logps, old_logps, advantages, mask, low=0.2, high=0.27):
  ratio = jnp.exp(logps - old_logps)  # [B, T]: one a token
  loss = clipped(ratio, advantages[:, None], low, high)
  return token_means(loss, mask).mean()


# %% [markdown]
# They are the package's, in value and in gradient, on a batch of made-up
# responses. (The package also survives NaN under the mask, empty and packed
# rows, and a batch that comes in pieces.)


# %%
def made_up(lengths, spread, seed=0):
  """Responses whose log-probs moved by `spread` since they were sampled."""
  rng = np.random.default_rng(seed)
  shape = len(lengths), max(lengths)
  old = -rng.exponential(0.5, shape)
  moved = spread * rng.standard_t(4, shape) / np.sqrt(2)  # std 1, heavy tails
  mask = np.arange(shape[1]) < np.array(lengths)[:, None]
  as_array = lambda x: jnp.array(x, jnp.float32)
  return as_array(old + moved), as_array(old), jnp.array(mask)


logps, old_logps, mask = made_up(lengths=[40, 24, 64, 12] * 8, spread=2e-3)
rewards = jnp.array([[1, 0, 0, 1, 1, 0, 1, 0]] * 4)  # 4 problems, 8 responses
advantages = group_relative_advantages(rewards).reshape(-1)

print("        value      package    largest gap of the gradients")
for name, mine, theirs in (
  ("GSPO", my_gspo, gspo_loss),
  ("GRPO", my_grpo, grpo_loss),
):
  value, slope = jax.value_and_grad(mine)(logps, old_logps, advantages, mask)
  (expected, _), expected_slope = jax.value_and_grad(theirs, has_aux=True)(
    logps, old_logps, advantages, mask
  )
  gap = float(jnp.abs(slope - expected_slope).max())
  print(f"{name}  {value:+.3e}  {expected:+.3e}    {gap:.0e}")
  np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(slope, expected_slope, rtol=1e-5, atol=1e-8)

# %% [markdown]
# ## What the length does to a ratio
#
# Let every token's log-prob move a little, by 0.02 in standard deviation and
# independently. The product of a response's token ratios, which importance
# sampling would ask for, runs away as the response grows. Token ratios stay as
# they are. The geometric mean closes in on 1 like $1/\sqrt n$: it is tens of
# times nearer to 1 than a token's ratio, so a clip range made for tokens would
# never touch it. Hence 3e-4 and 4e-4 where GRPO takes 0.2 and 0.27. (In a real
# run the tokens of a response move together to some extent: `tiny.ipynb`
# looks.)

# %%
lengths = 2 ** np.arange(4, 13)
responses, spread = 400, 0.02
token, product, geometric = [], [], []
for n in lengths:
  new, old, _ = made_up([n] * responses, spread, seed=int(n))
  moved = np.asarray(new - old)
  token.append(moved.ravel())
  product.append(moved.sum(1))
  geometric.append(moved.mean(1))

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
bins = np.linspace(-0.08, 0.08, 161)
style = {"bins": bins, "density": True, "histtype": "stepfilled"}
left.hist(token[2], color=GRPO, alpha=0.5, label="a token", **style)
for n, alpha in ((64, 0.3), (512, 0.6), (4096, 1.0)):
  label = f"GSPO's, {n:,} tokens"
  values = geometric[int(np.log2(n)) - 4]
  left.hist(values, color=GSPO, alpha=alpha, label=label, **style)
left.set(xlabel="log ratio", ylabel="density", yscale="log", xlim=(-0.08, 0.08))
left.set(title="Ratios of tokens and of responses", ylim=(0.05, None))
left.legend()

for values, colour, label in (
  (product, PRODUCT, "product of the token ratios"),
  (token, GRPO, "token ratio (GRPO)"),
  (geometric, GSPO, "geometric mean (GSPO)"),
):
  spreads = [v.std() for v in values]
  right.plot(lengths, spreads, "o-", color=colour, label=label)
right.axhline(0.2, color=GRPO, ls="--", label="GRPO clips at 0.2")
right.axhline(3e-4, color=GSPO, ls="--", label="GSPO clips at 0.0003")
right.set(xscale="log", yscale="log", xlabel="response length (tokens)")
right.set(ylabel="std of the log ratio", title="The spread, by length")
right.set_xticks(lengths[::2], lengths[::2])
right.set_ylim(1e-4, 20)
right.legend(ncols=2, fontsize=8, loc="upper left")
plt.show()

# %% [markdown]
# ## Where it clips
#
# The objective is flat, and the gradient zero, once a ratio has moved far
# enough the way its advantage asked for. It is never flat the other way: what
# went wrong can be repaired. The two panels differ in the horizontal scale
# only, by a factor of 675.

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True)
for axis, name, low, high in (
  (axes[0], "GSPO: ratio of the response", 3e-4, 4e-4),
  (axes[1], "GRPO: ratio of a token", 0.2, 0.27),
):
  offset = np.linspace(-2.2 * high, 2.2 * high, 400)
  for advantage, colour in ((1.0, "C2"), (-1.0, "C3")):
    gain = -clipped(1 + offset, advantage, low, high) - advantage
    label = f"advantage {'+' if advantage > 0 else '−'}1"
    axis.plot(offset, gain / high, color=colour, lw=2, label=label)
  axis.axvspan(high, offset[-1], color="C2", alpha=0.12)
  axis.axvspan(offset[0], -low, color="C3", alpha=0.12)
  text = {"ha": "center", "y": 1.25}
  axis.text(x=1.6 * high, s="clipped if good", color="C2", **text)
  axis.text(x=-1.47 * high, s="clipped if bad", color="C3", **text)
  ticks = (-low, 0, high)
  axis.set_xticks(ticks, [f"{1 + t:g}" for t in ticks])
  axis.set(title=name, xlabel="ratio", yticks=[0], ylim=(-2.4, 1.7))
axes[0].set_ylabel("objective gained")
axes[0].legend(loc="lower center")
plt.show()

# %% [markdown]
# ## The gradient of each token
#
# The gradient of both losses on one batch, a row a response, the good responses
# above the line. GSPO gives all tokens of a response one gradient, or none: it
# clips whole responses. GRPO weighs each token by its own noisy ratio, and
# clips the few that moved far. So GSPO clips far more tokens: the paper has 15
# % against 0.13 % in its runs, and GSPO ahead all the same.

# %%
lengths = np.random.default_rng(1).integers(40, 121, 32)
logps, old_logps, mask = made_up(lengths, spread=0.06, seed=3)
rows = jnp.arange(32)
advantages = jnp.where(rows < 16, 1.0, -1.0)
# Every response has drifted, too: by -0.3 to 0.4 % a token.
logps = jnp.where(mask, logps + 1e-3 * (rows % 8 - 3)[:, None], 0.0)

figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
for axis, name, loss in (
  (axes[0], "GSPO", gspo_loss),
  (axes[1], "GRPO", grpo_loss),
):
  slope, metrics = jax.grad(loss, has_aux=True)(
    logps, old_logps, advantages, mask
  )
  push = -slope * mask.sum(1, keepdims=True) * len(lengths)
  shown = np.where(mask, push, np.nan)
  image = axis.imshow(shown, cmap="RdYlGn", vmin=-1.3, vmax=1.3, aspect="auto")
  image.cmap.set_bad("0.85")
  axis.axhline(15.5, color="black", lw=1)
  share = metrics["clip_frac/token"].value()
  axis.set(title=f"{name}: {share:.1%} of the tokens clipped", xlabel="token")
  axis.grid(visible=False)
axes[0].set_ylabel("response")
label = "push on the log-prob,\nin units of 1 / (responses × tokens)"
figure.colorbar(image, ax=axes, label=label)
plt.show()

# %% [markdown]
# ## In somebody else's loop
#
# No model of ours, no config, no Flax: a table of logits, `optax`, and a game.
# Prompted with a digit, the policy has to count down from it to 0 and stop.
# Only a perfect response is rewarded, so that a random policy solves `1` once
# in 121 responses and `9` once in 11¹⁰. The policy is a table of 11 x 11
# logits: what follows what.

# %%
DIGITS, STOP, LENGTH, GROUP = 10, 10, 12, 32


def sample(table, key):
  """Responses to each digit, [DIGITS * GROUP, LENGTH], and who is right."""
  first = jnp.repeat(jnp.arange(DIGITS), GROUP)

  def step(last, key):
    token = jax.random.categorical(key, table[last])
    return token, token

  _, tokens = jax.lax.scan(step, first, jax.random.split(key, LENGTH))
  right = first - 1 - jnp.arange(LENGTH)[:, None]
  right = jnp.where(right < 0, STOP, right)
  is_response = jnp.cumsum(tokens == STOP, axis=0) - (tokens == STOP) == 0
  correct = jnp.where(is_response, tokens == right, True).all(0)
  return first, tokens.T, is_response.T, correct


def log_probs(table, first, tokens):
  before = jnp.concatenate([first[:, None], tokens[:, :-1]], axis=1)
  table = jax.nn.log_softmax(table)
  return table[before, tokens]


def train(loss, seed, steps=300, updates=4, **clips):
  optimizer = optax.adam(0.03)

  def iterate(carry, key):
    table = carry[0]  # the policy that samples the responses
    first, tokens, mask, correct = sample(table, key)
    rewards = correct.reshape(DIGITS, GROUP)
    advantages = group_relative_advantages(rewards).reshape(-1)
    old = log_probs(table, first, tokens)

    def update(carry, _):
      table, opt_state = carry
      objective = lambda table: loss(
        log_probs(table, first, tokens), old, advantages, mask, **clips
      )
      slope, metrics = jax.grad(objective, has_aux=True)(table)
      change, opt_state = optimizer.update(slope, opt_state)
      return (optax.apply_updates(table, change), opt_state), metrics

    carry, metrics = jax.lax.scan(update, carry, length=updates)
    return carry, (rewards.mean(1), metrics)

  table = jnp.zeros((DIGITS + 1, DIGITS + 1))
  start = table, optimizer.init(table)
  keys = jax.random.split(jax.random.key(seed), steps)
  (table, _), history = jax.lax.scan(iterate, start, keys)
  return table, *history


# %% [markdown]
# GSPO at the paper's clip range, GSPO at a hundred times that, and GRPO, three
# seeds each. The paper's range was tuned for long responses and small learning
# rates; this table of logits moves by 0.03 a step, and most responses leave the
# range with the first of four updates. It learns all the same, only slower:
# **the clip range limits how far a batch may move a response**, and belongs to
# the learning rate and to the length of the responses.

# %%
wide = {"clip_low": 0.03, "clip_high": 0.04}
cases = (
  ("GSPO, 3e-4 and 4e-4", gspo_loss, {}, "C0"),
  ("GSPO, 3e-2 and 4e-2", gspo_loss, wide, "C9"),
  ("GRPO, 0.2 and 0.27", grpo_loss, {}, "C1"),
)
seeds = jnp.arange(3)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
for name, loss, clips, colour in cases:
  run = jax.jit(jax.vmap(lambda seed, c=clips, f=loss: train(f, seed, **c)))
  tables, solved, metrics = run(seeds)  # solved: [seed, iteration, digit]
  count = metrics["clip_frac/token"]
  share = float(count.total.sum() / count.count.sum())
  curves = solved.mean(-1)
  left.plot(curves.T, color=colour, alpha=0.3, lw=1)
  label = f"{name}: {share:.2%} of tokens clipped"
  left.plot(curves.mean(0), color=colour, lw=2, label=label)
  assert curves[:, -30:].mean() > 0.9, name
  if loss is gspo_loss and not clips:
    by_digit, table = solved[0], tables[0]
left.set(xlabel="iteration", ylabel="share of right responses", ylim=(0, 1.02))
left.set_title("Counting down, mean of all digits and three seeds")
left.legend(loc="lower right")

image = right.imshow(by_digit.T, aspect="auto", origin="lower", cmap="viridis")
right.set(xlabel="iteration", ylabel="digit to count down from")
right.set(title="GSPO, 3e-4 and 4e-4, seed 0", yticks=range(10))
right.grid(visible=False)
figure.colorbar(image, ax=right, label="share of right responses")
plt.show()

# %% [markdown]
# Nobody made this curriculum. A digit is hopeless until the one below it is
# known; then a right response turns up in its group now and then, and the
# group's advantages, zero so far, begin to teach. What the policy says now:

# %%
first, tokens, mask, correct = sample(table, jax.random.key(7))
lines = []
for row in range(0, DIGITS * GROUP, GROUP):
  said = " ".join("■" if t == STOP else str(t) for t in tokens[row][mask[row]])
  lines.append(f"{first[row]}: {said}  {'' if correct[row] else 'wrong'}")
print("\n".join(lines))
