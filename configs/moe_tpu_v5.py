"""Qwen3 MoE policies on TPU v5: 30B-A3B by default, 235B-A22B on request.

  python -m gspo_jax.plan --config=configs/moe_tpu_v5.py --topology=v5p:4x4x4
  python -m gspo_jax.main --config=configs/moe_tpu_v5.py --workdir=gs://...

`configs/moe_tpu_v5.py:checkpoint=DIR,questions=FILE` trains the model of a
Hugging Face folder, such as Qwen3-30B-A3B or one of its releases 2507, on maths
questions: JSON lines, Parquet, or any `data.source`. Every host must see both.
Without them a run starts from random weights on the embedded task, to try a
pod. `variant=qwen3-235b-a22b,topology=v5p:4x8x8` takes another size or slice;
`debug` shrinks every size, to run anywhere.

By default 512 prompts x 16 responses of at most 16,384 tokens an iteration, by
continuous batching; the other slices take 4,096 tokens a response, its prompt
included.

What the plan printed (compiler rooflines of libtpu 0.0.51: nothing ran on a
chip); HBM is needed of 95.73 GiB, MFU is of update, with perfect overlap, as
scheduled and with none:

  30B-A3B, v5p:4x4x4: update and old log-probs, one program, 82.1 GiB, weights
    for decoding 23.9, prefill 86.5, generate 85.9; MFU 64, 59, 55 %, with
    attention counted as the causal half; an update 319 s if every response has
    full length, 90 s with `--lengths=lognormal:mean=.25,sigma=1`, an iteration
    281 s. A decode step of 8,192 slots takes 34.0 ms with every page
    full, 1.04 times the least bytes; 392,640 pages are the most that leave 8 %
    of the HBM free: 6,135 tokens a slot.
  235B-A22B, v5p:4x8x8: weights for decoding 77.8 GiB, prefill 68.7, generate
    60.7; a decode step of 4,096 slots 18.0 ms with every page full, 1.07 times
    the least bytes. Over 16 chips, not 32, a step took 22.1 ms, and the weights
    did not fit on their way (104.4).
  30B-A3B, v5e:8x16: prefill 14.2, generate 12.8 of 15.75 GiB; a decode step of
    2,048 slots 14.5 ms with every page full, 1.00 times the least bytes.
  By an earlier commit, with rows of 4,096 tokens:
  30B-A3B, v5p:4x4x4, with the least kept: update 31.4 GiB; MFU 57, 48, 44 %.
  235B-A22B, v5p:4x8x8: update 75.7, old log-probs 29.5 GiB; MFU 60, 47, 42 %;
    an update 45 s. One row a chip gave 34 % without overlap: weights are
    gathered for too few tokens. Over `data`, gradients are summed once a
    micro-batch.
  30B-A3B, v5e:8x16: update 10.8, old log-probs 4.4 of 15.75 GiB; MFU 51, 32,
    30 %, with attention counted as the causal half.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from gspo_jax.configs import common

_KEEP_MOST = ("attention", "stream", "heads", "tokens", "hidden")
_KEEP_LITTLE = ("attention", "stream")


class _Slice(NamedTuple):
  """How a variant lies on a slice, chosen with gspo_jax.plan.

  Attributes:
    chips: of the slice.
    fsdp: `mesh.fsdp`; what is left goes to `data`.
    expert: `mesh.expert`.
    decoding: `sampler_mesh.expert`.
    prompts: of an iteration.
    group_size: responses a prompt.
    new_tokens: most tokens of a response.
    pages: `continuous_batching.num_pages`.
    rows: packed rows a chip in one forward and backward pass.
    keep: what blocks do not compute again.
    instruments: `log.instruments`.
  """

  chips: int
  fsdp: int
  expert: int
  decoding: int
  prompts: int
  group_size: int
  new_tokens: int
  pages: int
  rows: int
  keep: tuple[str, ...]
  instruments: bool


_SLICES = {
  ("qwen3-30b-a3b", "v5p:4x4x4"): _Slice(
    chips=64,
    fsdp=16,
    expert=4,
    decoding=8,
    prompts=512,
    group_size=16,
    new_tokens=16384,
    pages=384_000,  # of 392,640 that the plan allows
    rows=1,
    keep=_KEEP_MOST,
    # The experts of every token and their log-probs take 79 GiB more.
    instruments=False,
  ),
  ("qwen3-30b-a3b", "v5e:8x16"): _Slice(
    chips=128,
    fsdp=32,
    expert=4,
    decoding=16,
    prompts=256,
    group_size=8,
    new_tokens=3072,
    pages=50_688,  # of 53,760 that the plan allows
    rows=1,
    keep=_KEEP_LITTLE,
    instruments=True,
  ),
  ("qwen3-235b-a22b", "v5p:4x8x8"): _Slice(
    chips=256,
    fsdp=32,
    expert=4,
    decoding=32,
    prompts=512,
    group_size=8,
    new_tokens=3072,
    pages=0,  # as many as all slots can need: 135,168 of 351,232
    rows=2,
    keep=_KEEP_LITTLE,
    instruments=True,
  ),
}


def get_config(arg: str = "") -> ConfigDict:
  """arg: comma-separated `checkpoint=`, `questions=`, `variant=`, `topology=`
  with their values, and `debug`."""
  words = [word for word in arg.split(",") if word]
  chosen = dict(word.split("=", 1) for word in words if "=" in word)
  rest = {word for word in words if "=" not in word}
  variant = chosen.pop("variant", "qwen3-30b-a3b")
  topology = chosen.pop("topology", "v5p:4x4x4")
  checkpoint = chosen.pop("checkpoint", "")
  questions = chosen.pop("questions", "")
  if bool(checkpoint) != bool(questions):
    raise ValueError(
      f"configs/moe_tpu_v5.py:{arg}: expected checkpoint= and questions=, or "
      "neither of them"
    )
  if chosen or rest - {"debug"} or (variant, topology) not in _SLICES:
    raise ValueError(
      f"configs/moe_tpu_v5.py:{arg}: expected debug, "
      "checkpoint=DIR,questions=FILE, or one of "
      + "; ".join(f"variant={v},topology={t}" for v, t in _SLICES)
    )
  c = _sized(variant, _SLICES[variant, topology])
  if rest:
    common.shrink(c)
  if checkpoint:
    _train_on(c, checkpoint, questions)
  return c


def _train_on(c: ConfigDict, checkpoint: str, questions: str) -> None:
  """The keys of a run on maths questions, at any size."""
  c.model.checkpoint = checkpoint
  kind = "parquet:" if questions.endswith(".parquet") else "jsonl:"
  c.data.source = questions if ":" in questions else kind + questions
  c.data.instruction = (
    "{problem}\n\nReason step by step, and put the final answer in \\boxed{}."
  )
  c.data.max_prompt_length = 1024
  c.data.too_long = "drop"
  # DAPO (arXiv 2503.14476, sec. 3.4) punishes the last fifth of the length.
  buffer = c.sampler.max_new_tokens // 5
  c.reward.names = ("math", f"overlong:buffer={buffer}")
  c.reward.weights = (1.0, 1.0)
  c.reward.workers = 16


def _sized(variant: str, where: _Slice) -> ConfigDict:
  c = common.get_config()
  c.num_steps = 500
  c.model.variant = variant
  c.model.keep = where.keep
  c.mesh.data = -1
  c.mesh.fsdp = where.fsdp
  c.mesh.expert = where.expert
  c.sampler_mesh.expert = where.decoding
  c.sampler_mesh.tensor = 1

  c.data.prompts = where.prompts
  c.data.max_prompt_length = 1024
  c.rollout.group_size = where.group_size
  c.sampler.max_new_tokens = where.new_tokens
  c.learner.minibatches = 4  # GSPO, sec. 5.1
  c.learner.micro_batch_size = where.rows * where.chips
  c.log.instruments = where.instruments

  # All responses decode at once: most end soon, and make room in the pool.
  c.continuous_batching.slots = where.prompts * where.group_size
  c.continuous_batching.page_size = 128  # a TPU's lanes
  c.continuous_batching.num_pages = where.pages

  c.optim.learning_rate = 1e-6
  c.optim.warmup_steps = 20
  c.eval.prompts = 512
  c.eval.samples = 8
  return c
