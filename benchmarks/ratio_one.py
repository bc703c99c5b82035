"""Is the importance ratio of a policy that has not moved exactly 1?

  python -m benchmarks.ratio_one [--quick] [--out=FILE.json]

An iteration at learning rate 0, of four minibatches, in bfloat16, at many
meshes, objectives, and ways to save memory; made-up responses. The columns are
the standard deviation of the sequence ratio and the share of responses that are
clipped, twice: `apart`, with old log-probs of a program of their own (but for
the first minibatch, a quarter of the rows, which always takes those of the
update), and `one`, as a run makes them, by the program that updates.
"""

import argparse
import os

if __name__ == "__main__":  # before jax starts
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
  )

import dataclasses
from pathlib import Path

import jax
import numpy as np

from benchmarks import record
from gspo_jax.configs import tiny_cpu
from gspo_jax.learner import train_batch
from gspo_jax.losses import METHODS
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.record import metric_writer
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import STOPPED, Prompts, Samples

MESHES = {
  "1": {"data": 1},
  "8 data": {"data": 8},
  "8 fsdp, expert": {"data": 1, "fsdp": 2, "expert": 4},
  "8 fsdp, expert, tensor": {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2},
}


def config_of(objective="gspo", experts=True, remat=True, micro=16, **changes):
  """A config at learning rate 0.

  Args:
    objective: `objective.name`.
    experts: False: a dense model.
    remat: whether blocks are computed again in the backward pass.
    micro: `learner.micro_batch_size`, of 16 responses a minibatch.
    **changes: more keys of `objective`.
  """
  c = tiny_cpu.get_config("debug")
  c.model.dtype = "bfloat16"
  c.model.remat = "attention,stream" if remat else "none"
  if not experts:
    c.model.num_experts = c.model.experts_per_token = 0
  c.optim.learning_rate = 0.0
  c.data.prompts, c.rollout.group_size = 16, 4
  c.sampler.max_new_tokens = 48
  c.learner.minibatches, c.learner.micro_batch_size = 4, micro
  c.cold_start.steps = 0
  c.objective.update({"name": objective} | changes)
  return c


def responses(config) -> tuple[Prompts, Samples]:
  """Prompts, and responses of random tokens and lengths."""
  rng, c = np.random.default_rng(0), config
  P, S = c.data.prompts, c.data.max_prompt_length
  B, R = P * c.rollout.group_size, c.sampler.max_new_tokens
  draw = lambda *shape: rng.integers(0, 256, shape).astype(np.int32)
  prompts = Prompts(draw(P, S), rng.integers(1, S + 1, P).astype(np.int32))
  experts = None
  if c.objective.replay == "r3":  # any that differ
    shape = B, 2, S + R, 8
    order = rng.permuted(np.broadcast_to(np.arange(8), shape), axis=-1)
    experts = order[..., :2].astype(np.uint8)
  samples = Samples(
    experts=experts,
    tokens=draw(B, R),
    logps=np.zeros((B, R), np.float32),
    lengths=rng.integers(1, R + 1, B).astype(np.int32),
    finish=np.full(B, STOPPED, np.int8),
    slot_steps=np.int32(0),
  )
  return prompts, samples


def measure(config, mesh, *, apart: bool = False) -> dict[str, float]:
  """The metrics of an iteration on random rewards.

  Args:
    config: of `config_of`.
    mesh: the devices.
    apart: take the old log-probs from a program of its own.
  """
  run = build_program(parse(config), mesh)
  rows = sharding.batch_sharding(mesh)
  with jax.set_mesh(mesh):
    state = run.learner.init_state(run.init_params(jax.random.key(0)))
    prompts, samples = responses(config)
    lengths = samples.lengths
    samples = dataclasses.replace(
      multihost.to_global(dataclasses.replace(samples, slot_steps=None), rows),
      slot_steps=multihost.to_global(
        samples.slot_steps, sharding.replicated(mesh)
      ),
    )
    packing = run.learner.pack(prompts.lengths, lengths, jax.random.key(2))
    batch, scored = (
      run.learner.make_train_batch(
        multihost.to_global(prompts, rows), samples, packing
      ),
      {},
    )
    if run.learner.needs_old_logps:
      state, batch, scored = run.learner.compute_old_logps(state, batch)
    if apart:
      batch = _with_old_logps_alone(run, state, batch)
    if run.learner.add_reference_and_values:
      batch = run.learner.add_reference_and_values(state, batch)
    rewards = np.random.default_rng(1).standard_normal(len(lengths))
    rewards = multihost.to_global(rewards.astype(np.float32), rows)
    batch = run.learner.assign_advantages(batch, rewards, samples.finish)
    _, _, learnt = run.learner.update(state, batch)
  return metric_writer.to_scalars(scored, learnt)[0]


def _with_old_logps_alone(run, state, batch):
  """The batch with old log-probs of a program of their own."""

  def score(params, rows):
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), rows)
    flat = sharding.constrain(flat, sharding.BATCH_AXES)
    return train_batch.response_logps(params, run.cfg, flat).logps

  rows = dataclasses.replace(batch.rows, experts=None)
  old_logps = jax.jit(score)(state.params, rows).reshape(rows.old_logps.shape)
  return batch._replace(
    rows=dataclasses.replace(batch.rows, old_logps=old_logps)
  )


def table(quick: bool) -> list[dict]:
  """What to measure: `measure`'s mesh and `config_of`'s arguments."""
  plain = [
    {"mesh": mesh, "experts": experts, "remat": remat}
    for mesh in MESHES
    for experts in (True, False)
    for remat in (True, False)
  ]
  family = [
    {"mesh": "1", "objective": name} for name in METHODS if name != "gspo"
  ]
  cuts = [{"mesh": "1", "remat": False, "micro": n} for n in (2, 4, 8)]
  replays = [{"mesh": "1", "replay": replay} for replay in ("r2", "r3")]
  rows = plain + family + cuts + replays
  return rows[:2] if quick else rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="two rows")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  found = []
  print("what | apart: std, clipped | one: std, clipped | first minibatch")
  for row in table(args.quick):
    axes = MESHES[row["mesh"]]
    devices = jax.devices()[: int(row["mesh"].split()[0])]
    mesh = sharding.make_mesh(devices, **axes)
    asked = {k: v for k, v in row.items() if k != "mesh"}
    own = {}
    for apart in (True, False):
      got = measure(config_of(**asked), mesh, apart=apart)
      own["apart" if apart else "one"] = {
        key: got[key]
        for key in (
          "ratio/sequence_std",
          "clip_frac/sequence",
          "ratio/first_minibatch_std",
        )
      }
    found.append(row | own)
    cells = [
      f"{x['ratio/sequence_std']:.1e}, {x['clip_frac/sequence']:.2f}"
      for x in own.values()
    ]
    first = own["one"]["ratio/first_minibatch_std"]
    print(" | ".join([str(row), *cells, f"{first:.1e}"]), flush=True)
  record.finish("ratio_one", {"rows": found}, args.out)


if __name__ == "__main__":
  main()
