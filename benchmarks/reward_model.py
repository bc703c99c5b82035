"""InstructGPT's recipe on the embedded task: a reward model, then PPO with it.

  python -m benchmarks.reward_model --to=runs/reward_model \\
    [--seeds 0 1 2] [--out=FILE.json]

Trains a dense classifier of 0.1M parameters on pairs of a right and a wrong
answer to chains of arithmetic, and writes it as a Hugging Face folder, new or
empty. Its weights first learn right answers, token by token; then the pairs, by
eq. 1 of Ouyang et al. 2022 (arXiv 2203.02155) with K = 2,

  loss = -mean log sigmoid(r(x, right) - r(x, wrong)).

Then `gspo_jax.main` trains with `reward.names=final_answer,model:FOLDER` and
`reward.weights=0,1`, once a seed: only the model rewards, and `eval/*` is exact
match. Departure: the scores are not shifted to a mean of 0.
"""

import argparse
import dataclasses
import random
import re
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import record, seeds
from gspo_jax import model
from gspo_jax.data import tokenizers
from gspo_jax.model import hf
from gspo_jax.tasks.chain import OPERATIONS, Chain

STEPS = (1, 2)  # of the chains that it learns
WIDTH, BATCH = 32, 64  # tokens of a row; pairs of an update
NOISE = 0.2  # probability of an error, and of one in a demonstration
HELD_OUT = 256  # pairs that measure it, of the longest chains
CFG = model.ModelConfig(
  vocab_size=258,
  num_layers=3,
  embed_dim=64,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_dim=128,
  num_experts=0,
  experts_per_token=0,
  rope_theta=1e4,
  tie_embeddings=True,
  classifier=True,
  dtype="float32",
  remat="none",
)
LANGUAGE_MODEL = dataclasses.replace(CFG, classifier=False)
TOKENIZER = tokenizers.load("bytes")
PPO = {
  "data.source": f"chain:steps={STEPS[-1]},demonstrated=1|2,noise={NOISE}",
  "data.prompts": 16,
  "data.max_prompt_length": 8,
  "sampler.max_new_tokens": 20,
  "objective.name": "ppo:critic_learning_rate=1e-3",
  "objective.kl_coef": 0.05,  # InstructGPT has 0.02
  "objective.kl_estimator": "k1",
  "reward.weights": "0,1",
  "cold_start.steps": 1200,
  "cold_start.gate": 0,
  "eval.every": 20,
  "eval.prompts": 64,
  "num_steps": 60,
}


def wrong_answer(text: str, reference: str, seed: int) -> str:
  """A worked answer to a chain with errors, which changes the result.

  An error is a wrong operand or a wrong result of a step.
  """
  rng, result = random.Random(f"wrong {seed}"), reference
  noisy = lambda x: rng.randrange(10) if rng.random() < NOISE else x
  while result == reference:
    value, answer = int(text[0]), ""
    for label, operation, operand in re.findall(r"([a-z])(.)(\d)", text):
      operand = noisy(int(operand))
      answer += f"{label}{value}{operation}{operand}="
      value = noisy(OPERATIONS[operation](value, operand) % 10)
      answer += f"{value};"
    result = str(value)
  return f"{answer}#{result}"


def pairs(source: Chain, indices: range) -> tuple[np.ndarray, np.ndarray]:
  """Tokens [2N, WIDTH] and lengths [2N]; the right answers are first."""
  problems = [source[i] for i in indices]
  texts = [p.text + p.demonstration for p in problems]
  texts += [
    p.text + wrong_answer(p.text, p.reference, i)
    for i, p in zip(indices, problems, strict=True)
  ]
  tokens = np.full((len(texts), WIDTH), TOKENIZER.pad_id, np.int32)
  lengths = np.zeros(len(texts), np.int32)
  for row, text in enumerate(texts):
    ids = [*TOKENIZER.encode(text), TOKENIZER.stop_ids[0]]
    tokens[row, : len(ids)], lengths[row] = ids, len(ids)
  return tokens, lengths


def imitation(params, tokens, lengths):
  """Cross entropy of the right answers, prompts included."""
  tokens, lengths = tokens[: len(tokens) // 2], lengths[: len(tokens) // 2]
  positions = jnp.broadcast_to(jnp.arange(WIDTH), tokens.shape)
  mask = (positions < lengths[:, None]).astype(jnp.int32)
  logits = model.forward(params, LANGUAGE_MODEL, tokens, positions, mask).logits
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits[:, :-1], tokens[:, 1:]
  )
  return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()


def margins(params, tokens, lengths):
  right, wrong = jnp.split(model.scores(params, CFG, tokens, lengths), 2)
  return right - wrong


def preference(params, tokens, lengths):
  return -jax.nn.log_sigmoid(margins(params, tokens, lengths)).mean()


def fit(params, loss, *, first: int, updates: int, peak: float) -> model.Params:
  """AdamW on the pairs from index `first` on, each seen once."""
  schedule = optax.warmup_cosine_decay_schedule(
    0, peak, min(50, updates // 4), updates, peak / 10
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, b2=0.98, weight_decay=0.01),
  )

  @jax.jit
  def update(params, state, tokens, lengths):
    value, grads = jax.value_and_grad(loss)(params, tokens, lengths)
    changes, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, changes), state, value

  state, source = optimizer.init(params), Chain(STEPS)
  for i in range(updates):
    begin = first + i * BATCH
    batch = pairs(source, range(begin, begin + BATCH))
    params, state, value = update(params, state, *batch)
    if i % 50 == 0 or i == updates - 1:
      print(f"{loss.__name__} {i}: {value:.3f}", flush=True)
  return params


def train(folder: Path, imitated: int, compared: int) -> dict:
  """Writes the classifier; how often it prefers the right answer."""
  began = time.process_time()
  params = model.init(jax.random.key(0), CFG)
  params = fit(params, imitation, first=0, updates=imitated, peak=2e-3)
  params = fit(
    params, preference, first=imitated * BATCH, updates=compared, peak=1e-3
  )
  held_out = pairs(Chain(STEPS[-1:], evaluation=True), range(HELD_OUT))
  margin = np.asarray(jax.jit(margins)(params, *held_out))
  hf.save_hf(params, CFG, folder, beside=TOKENIZER.save)
  return {
    "updates of imitation": imitated,
    "updates on pairs": compared,
    "held-out pairs in order": round(float((margin > 0).mean()), 3),
    "held-out margin": round(float(margin.mean()), 2),
    "CPU seconds": round(time.process_time() - began),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--to", type=Path, required=True)
  parser.add_argument("--imitate", type=int, default=500)
  parser.add_argument("--compare", type=int, default=1500)
  parser.add_argument("--seeds", type=int, nargs="*", default=[])
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  found = {"reward model": train(args.to, args.imitate, args.compare)}
  print(found, flush=True)
  names = f"final_answer,model:{args.to.absolute()}"
  with tempfile.TemporaryDirectory() as folder:
    found["ppo"] = [
      seeds.train(
        "configs/tiny_cpu.py",
        Path(folder) / str(seed),
        seed=seed,
        **PPO | {"reward.names": names},
      )
      for seed in args.seeds
    ]
  record.finish("reward_model", found, args.out)


if __name__ == "__main__":
  main()
