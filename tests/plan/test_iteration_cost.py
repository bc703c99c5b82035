"""The cost of an iteration, from scripted costs of its functions."""

import copy
import types

import jax
import numpy as np
import pytest

from gspo_jax.model import attention
from gspo_jax.plan import chips, lower_bounds
from gspo_jax.plan.derates import Derates
from gspo_jax.plan.iteration import cost as iteration_cost
from gspo_jax.plan.iteration.lengths import Lengths
from gspo_jax.plan.lower import Planned
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding

DERATES = Derates()
WHERE = chips.parse("v5e:2x2")
P, G, S, R = 8, 4, 8, 12
STEP = 1e-3  # seconds of a decode step


def parts(micro_batch, rest):
  """The report of a function by micro-batch, in seconds."""
  seconds = lambda x: {
    "seconds": {"scheduled": x, "roofline": x}, "block_seconds": 0.0
  }  # fmt: skip
  return {
    "parts": {
      "micro_batch": seconds(micro_batch),
      "rest": seconds(rest),
      "most_micro_batches": 8,
    },
    **{"top": [], "branches": [], "collectives": []},
    "memory": {"arguments": 5e9},
  }


FUNCTIONS = {
  "update": parts(3.0, 4.0),
  "old_logps": parts(1.0, 0.5),
  "reference_and_values": parts(2.0, 0.0),
  "decode_params": {"seconds": {"scheduled": 0.25}},
  "prefill": {"seconds": {"scheduled": 0.125}},
  "generate": {
    "seconds": {"scheduled": 0.5 + (R - 1) * STEP},
    **{"loops": [], "collectives": [], "unknown_kernels": {}},
    "decode": {
      "steps": R - 1,
      "seconds": {"scheduled": STEP, "roofline": STEP},
      "without_cache": STEP,
      "reading": {"row": 0.0, "block": 0.0},
      "move": 0.0,
    },
  },
}
LONGEST = Lengths(np.full(P, S), np.full(P * G, R))


def uneven():
  responses = np.ones(P * G, int)
  responses[::8] = R
  return Lengths(np.arange(1, P + 1), responses)


@pytest.fixture
def config(debug_config):
  debug_config.data.prompts = P
  debug_config.learner.update({"minibatches": 2, "micro_batch_size": 4})
  return debug_config


def twice(report, of="parts seconds decode micro_batch rest without_cache "
          "scheduled roofline block_seconds"):  # fmt: skip
  """All seconds of a report, doubled."""
  double = lambda x: twice(x) if isinstance(x, dict) else 2 * x
  counts = {"steps", "most_micro_batches"} & set(report)
  doubled = {x: double(report[x]) for x in of.split() if x in report}
  return doubled | {x: report[x] for x in counts}


def part(found, name):
  """Seconds of a part of an iteration, of which sampling has several."""
  of = found["seconds_of"]
  others = [of[x] for x in of if x not in ("weights", "score", "update")]
  return sum(others) if name == "generate" else of[name]


def cost(
  config,
  lengths,
  functions=FUNCTIONS,
  own=(),
  transfer=None,
  fewer_slots=types.MappingProxyType({}),
  **more,
):
  """By a compiler's estimate of twice the seconds; `fewer_slots`: of a step."""
  functions = {
    name: f | {"compiler": twice(f) | {"share": 0.5}}
    for name, f in functions.items()
  }
  config = parse(config)
  mesh = sharding.make_mesh(jax.devices()[:2], data=2)
  program = build_program(config, mesh, sampler_devices=own)
  if program.sampler.generate.batching:
    decode = functions["generate"]["decode"]
    functions["generate"]["fewer_slots"] = {
      slots: {
        "without_cache": fewer_slots.get(slots, STEP),
        "compiler": 2 * fewer_slots.get(slots, STEP),
        "reading": decode["reading"],
      }
      for slots in program.sampler.generate.compute_sizes[1:]
    }
  return iteration_cost.cost(
    functions,
    Planned(config, program, WHERE),
    lengths,
    DERATES,
    transfer,
    **more,
  ), program


def test_the_slower_side_of_a_split_is_the_iteration(config):
  found, totals = [], []
  for ahead in (0, 1):
    config.rollout.max_staleness = ahead
    one, _ = cost(
      config, LONGEST, FUNCTIONS, jax.devices()[2:4], {"seconds": 7}
    )
    found.append(one["seconds_of"])
    totals.append(one["seconds"])
  assert found[0] == found[1]
  sampling = part(one, "generate") + part(one, "weights") + 7
  learning = part(one, "score") + part(one, "update")
  assert totals == pytest.approx([sampling + learning, max(sampling, learning)])
  turns, _ = cost(config, LONGEST)
  assert turns["seconds"] == pytest.approx(sampling - 7 + learning)
  # Four devices, and two that do each part.
  assert one["mfu"] * totals[1] * 2 == pytest.approx(
    turns["mfu"] * turns["seconds"]
  )


def test_full_lengths_cost_what_was_compiled(config):
  found, _ = cost(config, LONGEST)
  update, score = (found["learning"][x] for x in ("update", "old_logps"))
  assert update["micro_batches"] == P * G // 4
  assert part(found, "update") == 4.0 + 8 * 3.0
  # One micro-batch of the first minibatch, and all of the second.
  assert score["micro_batches"] == 1 + 4
  assert part(found, "score") == 0.5 + 5 * 1.0
  by_compiler = found["compiler"]
  for name in ("weights", "score", "update"):
    assert part(by_compiler, name) == 2 * part(found, name)
  total = sum(by_compiler["seconds_of"].values())
  assert by_compiler["seconds"] == total
  assert by_compiler["mfu"] * total == pytest.approx(
    found["mfu"] * found["seconds"]
  )
  whole = FUNCTIONS["generate"]["seconds"]["scheduled"]
  assert part(by_compiler, "generate") == pytest.approx(2 * whole, rel=0.01)
  # The mean cache is half the longest.
  assert part(found, "generate") == pytest.approx(whole, rel=0.01)
  assert found["decoding"]["slot_steps"] == P * G * R
  for rows in (update, score):
    assert rows["real"] == rows["computed"]
  assert found["seconds"] == sum(found["seconds_of"].values())


def test_short_responses_share_rows_and_end_early(config):
  found, program = cost(config, uneven())
  update, decoding = found["learning"]["update"], found["decoding"]
  packed = program.learner.pack(*uneven(), jax.random.key(0))
  count = int(packed.num_micro_batches.sum())
  assert count < P * G // 4
  assert update["micro_batches"] == count
  assert part(found, "update") == 4.0 + count * 3.0
  assert update["computed"] == count * 4 * (S + R)
  assert update["real"] == sum(
    whole.sum() for whole in (uneven().prompts * G, uneven().responses)
  )
  assert decoding["steps"] == R - 1  # all wait for the longest
  assert decoding["slot_steps"] == P * G * R


def test_a_micro_batch_waits_for_the_row_with_the_most_blocks(
  config, monkeypatch
):
  """Blocks of 4 columns, counted token by token; 2 s of 3 are in blocks."""
  monkeypatch.setattr(attention, "splash_blocks", lambda tokens: (4, 4))
  functions = FUNCTIONS | {"update": copy.deepcopy(FUNCTIONS["update"])}
  functions["update"]["parts"]["micro_batch"]["block_seconds"] = 2.0
  found, program = cost(config, uneven(), functions)
  packed = program.learner.pack(*uneven(), jax.random.key(0))
  prompts, responses = uneven()
  whole, width = np.repeat(prompts, G) + responses, S + R
  # Padding is a sequence of one token each.
  segment = -1 - np.tile(np.arange(width), (P * G, 1))
  for i, n in enumerate(whole):
    segment[packed.row[i], packed.offset[i] : packed.offset[i] + n] = i
  needed = []
  for row in segment:
    same = np.tril(row[:, None] == row)
    needed.append(same.reshape(5, 4, 5, 4).any((1, 3)).sum())
  fullest = np.max(np.reshape(needed, (2, -1, 4)), axis=2)
  shares = [
    x / 15
    for row, count in zip(fullest, packed.num_micro_batches, strict=True)
    for x in row[:count]
  ]
  assert 0 < min(shares) < max(shares)
  assert found["needed_blocks"] == pytest.approx(np.mean(shares))
  assert part(found, "update") == pytest.approx(
    4.0 + sum(1.0 + 2.0 * share for share in shares)
  )


def test_useful_flops_are_those_of_each_response_alone(config):
  found, program = cost(config, uneven())
  forward = lower_bounds.forward_flops
  prompts = np.repeat(uneven().prompts, G)
  pairs = list(zip(prompts.tolist(), uneven().responses.tolist(), strict=True))
  whole = sum(forward(program.cfg, 1, p + r, r) for p, r in pairs)
  flops = found["model_flops"]
  assert flops["update"] == pytest.approx(3 * whole)
  assert 0 < flops["score"] < whole
  peak = WHERE.chip.flops * program.mesh.size
  total = sum(flops.values())
  assert found["mfu"] == pytest.approx(total / found["seconds"] / peak)
  decoded = sum(forward(program.cfg, 1, r, r, past=p) for p, r in pairs)
  prefilled = sum(forward(program.cfg, 1, p, 1) for p in range(1, P + 1))
  assert flops["generate"] == pytest.approx(decoded + prefilled)


def test_a_reference_and_a_critic_are_scored_and_updated(config):
  plain, _ = cost(config, LONGEST)
  config.objective.update({"name": "ppo", "kl_coef": 0.1})
  found, _ = cost(config, LONGEST)
  assert part(found, "score") == part(plain, "score") + 8 * 2.0
  ratio = found["model_flops"]["update"] / plain["model_flops"]["update"]
  assert 1.5 < ratio < 2


@pytest.fixture
def continuous(config):
  config.continuous_batching.update(
    {"slots": 8, "page_size": 4, "prefill_chunk": 8}
  )
  return config


def test_each_segment_costs_what_its_program_does(continuous):
  """A step of all slots, and one of a part of them, when few sample."""
  continuous.continuous_batching.slots = P * G
  fewer = {16: 2e-4}
  found, program = cost(continuous, uneven(), fewer_slots=fewer)
  assert set(program.sampler.generate.compute_sizes) == {16, P * G}
  decoding = found["decoding"]
  by_rows = {n: sums.steps for n, sums in decoding["by_rows"].items()}
  assert sum(by_rows.values()) == decoding["steps"] == R
  seconds = by_rows[P * G] * STEP + by_rows[16] * fewer[16]
  assert part(found, "steps") == pytest.approx(seconds)
  assert part(found, "weights") == 0.25
  for name in ("steps", "prefill"):
    by_compiler = part(found["compiler"], name)
    assert by_compiler == pytest.approx(2 * part(found, name))


def test_each_step_waits_for_the_fullest_shard(continuous):
  """Two shards: all long responses are on one, or half of them on each."""
  continuous.continuous_batching.slots = P * G
  prompts = np.full(P, S)
  one = np.where(np.arange(P * G) < P * G // 2, R, 1)
  both = np.where(np.arange(P * G) % 2, R, 1)
  reading = copy.deepcopy(FUNCTIONS)
  reading["generate"]["decode"]["reading"]["block"] = 1.0
  found = [
    cost(continuous, Lengths(prompts, x), reading)[0] for x in (one, both)
  ]
  # A row of 8 + n tokens reads pages of 4; an idle one reads none.
  pages = np.array([-(-(S + n) // 4) for n in range(R)])
  sums = found[0]["decoding"]["by_rows"][P * G]
  assert sums.most_blocks == 16 * pages.sum()
  assert sums.blocks == (16 * (pages.sum() + pages[0])) / 2
  assert part(found[0], "waiting") == sums.most_blocks - sums.blocks
  assert part(found[1], "waiting") == 0


def test_drafted_tokens_save_steps_while_few_slots_sample(continuous):
  continuous.continuous_batching.slots = 4 * P * G
  continuous.data.prompts = 4 * P
  lengths = Lengths(*(np.tile(x, 4) for x in uneven()))
  plain = cost(continuous, lengths)[0]["decoding"]
  continuous.continuous_batching.speculation = 3
  found, _ = cost(continuous, lengths, tokens_a_step=2.0)
  # One of 8 responses has more than a token: all but the first step are few.
  assert plain["steps"] == R
  assert found["decoding"]["steps"] == 1 + -(-(R - 1) // 2)


def test_partial_rollouts_are_counted_as_if_all_responses_ended(continuous):
  plain, _ = cost(continuous, uneven())
  continuous.rollout.max_tokens_per_iteration = 5
  found, _ = cost(continuous, uneven())
  assert found["model_flops"] == plain["model_flops"]
  assert (plain["continues"], found["continues"]) == (False, True)
