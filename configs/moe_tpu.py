"""Qwen3 MoE models and OLMoE on slices of TPU v5e, v5p and v6e.

  python -m gspo_jax.plan --config=configs/moe_tpu.py --topology=v5p:4x4x4
  python -m gspo_jax.main --config=configs/moe_tpu.py --workdir=gs://...

Arguments follow a colon, with commas between:

  variant=qwen3-235b-a22b        a model of `SLICES`; default qwen3-30b-a3b
  topology=v5p:4x8x8             a slice of it; default its first
  checkpoint=DIR,questions=FILE  train a Hugging Face folder on maths questions:
                                 JSON lines, Parquet, or any `data.source`
  eval=FILE                      held-out questions; default an eighth of them
  debug                          shrinks every size, to run anywhere

Every host must see folder and files. Without them a run starts from random
weights on the embedded task, to try a pod. docs/scaling.md has a table of the
slices, with bytes and seconds by the plan.

What the plan printed (compiler rooflines of libtpu 0.0.51: nothing ran on a
chip); HBM is needed of 95.73 GiB on v5p, 31.24 on v6e, 15.75 on v5e, MFU is of
update, with perfect overlap, as scheduled and with none:

  30B-A3B, v5p:4x4x4: 512 prompts x 16 responses of at most 16,384 tokens.
    Update and old log-probs, one program, 82.1 GiB, weights for decoding 23.9,
    prefill 86.5, generate 85.9; MFU 64, 59, 55 %, with attention counted as the
    causal half; an update 319 s if every response has full length, 90 s with
    `--lengths=lognormal:mean=.25,sigma=1`, an iteration 281 s. A decode step of
    8,192 slots takes 34.0 ms with every page full, 1.04 times the least bytes;
    392,640 pages are the most that leave 8 % of the HBM free: 6,135 tokens a
    slot.
  30B-A3B, v5p:2x2x2, adapters: update and old log-probs 24.6 GiB, weights for
    decoding 26.7, prefill 45.0, generate 43.2; MFU 33, 24, 20 %. An update of
    full lengths 35.6 s as scheduled, a decode step of 512 slots 15.4 ms, 1.07
    times the least bytes; with lognormal lengths an iteration 33.5 s: 17.3 to
    generate, 3.8 for old log-probs, 12.2 to update.
  30B-A3B, v6e:4x4, adapters: update 14.7, weights for decoding 15.0, prefill
    24.1, generate 22.6 GiB; an update of full lengths 25.5 s as scheduled, a
    decode step 13.6 ms, 1.01 times the least bytes.
  30B-A3B, v5e:8x16: prefill 14.2, generate 12.8 GiB; a decode step of 2,048
    slots 14.5 ms with every page full, 1.00 times the least bytes.
  235B-A22B, v5p:4x8x8: update and old log-probs 76.7 GiB, weights for decoding
    77.8, prefill 68.7, generate 60.7; MFU 59, 47, 41 %; an update of full
    lengths 45.1 s as scheduled. A decode step of 4,096 slots 18.0 ms with every
    page full, 1.07 times the least bytes. Over 16 chips, not 32, a step took
    22.1 ms, and the weights did not fit on their way (104.4).
  Coder-480B-A35B, v5p:4x4x4, adapters: update and old log-probs 84.4 GiB,
    weights for decoding 92.3, prefill 71.4, generate 69.9; MFU 47, 33, 28 %. An
    update of full lengths 32.4 s as scheduled, a decode step 18.2 ms, 1.07
    times the least bytes; with lognormal lengths an iteration 66.4 s: 43.4 to
    generate, 6.4 for old log-probs, 16.2 to update. With `sampler_mesh.expert`
    32 or 8 the weights did not fit on their way (124 GiB of temporaries, 96.3
    in all).
  OLMoE, v6e:2x4: update and old log-probs 25.9 GiB, weights for decoding 16.7,
    prefill 28.4, generate 26.9; MFU 31, 23, 23 %. An update of full lengths
    9.7 s as scheduled, a decode step of 512 slots 11.1 ms with every page full,
    1.00 times the least bytes; with lognormal lengths an iteration 14.9 s: 10.2
    to generate, .9 for old log-probs, 3.7 to update (with 8,192 pages; all its
    tokens at once take 4,000).
  By an earlier commit, with rows of 4,096 tokens:
  30B-A3B, v5p:4x4x4, with the least kept: update 31.4 GiB; MFU 57, 48, 44 %.
  235B-A22B, v5p:4x8x8: one row a chip gave an MFU of 34 % without overlap:
    weights are gathered for too few tokens. Over `data`, gradients are summed
    once a micro-batch.
  30B-A3B, v5e:8x16: update 10.8, old log-probs 4.4 GiB; MFU 51, 32, 30 %, with
    attention counted as the causal half.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from gspo_jax.configs import common

_KEEP_MOST = ("attention", "stream", "heads", "tokens", "hidden")
_KEEP_LITTLE = ("attention", "stream")


class _Slice(NamedTuple):
  """How a model lies on a slice, chosen with gspo_jax.plan.

  Attributes:
    devices: of the slice.
    fsdp: `mesh.fsdp`; what is left goes to `data`.
    expert: `mesh.expert`.
    decoding: `sampler_mesh.expert`.
    decoding_tensor: `sampler_mesh.tensor`.
    prompts: of an iteration.
    group_size: responses a prompt.
    new_tokens: most tokens of a response.
    pages: `continuous_batching.num_pages`.
    rows: packed rows a device in one forward and backward pass.
    keep: what blocks do not compute again.
    instruments: `log.instruments`.
    lora_rank: `model.lora.rank`; 0: all weights are trained.
  """

  devices: int
  fsdp: int
  expert: int
  decoding: int
  decoding_tensor: int = 1
  prompts: int = 64
  group_size: int = 8
  new_tokens: int = 3072
  pages: int = 0
  rows: int = 1
  keep: tuple[str, ...] = _KEEP_LITTLE
  instruments: bool = True
  lora_rank: int = 0


_QWEN3_30B = {
  "v5p:4x4x4": _Slice(
    devices=64,
    fsdp=16,
    expert=4,
    decoding=8,
    prompts=512,
    group_size=16,
    new_tokens=16384,
    pages=384_000,  # of 392,640 that the plan allows
    keep=_KEEP_MOST,
    # The experts of every token and their log-probs take 79 GiB more.
    instruments=False,
  ),
  "v5e:8x16": _Slice(
    devices=128,
    fsdp=32,
    expert=4,
    decoding=16,
    prompts=256,
    pages=50_688,  # of 53,760 that the plan allows
  ),
  # An update of all weights needs 97 GiB of temporaries alone.
  "v5p:2x2x2": _Slice(
    devices=8, fsdp=2, expert=4, decoding=8, instruments=False, lora_rank=16
  ),
  "v6e:4x4": _Slice(
    devices=16, fsdp=4, expert=4, decoding=16, instruments=False, lora_rank=16
  ),
}
_QWEN3_235B = {
  # 135,168 pages are as many as all slots can need; the plan allows 351,232.
  "v5p:4x8x8": _Slice(
    devices=256, fsdp=32, expert=4, decoding=32, prompts=512, rows=2
  ),
}
_QWEN3_480B = {
  # Its 160 experts can be split over 32 devices at most, where all weights and
  # their moments are 168 GiB a device. With `decoding=32` every device would
  # also hold 19 GiB of attention weights to decode with.
  "v5p:4x4x4": _Slice(
    devices=64,
    fsdp=8,
    expert=4,
    decoding=4,
    decoding_tensor=8,
    instruments=False,
    lora_rank=16,
  ),
}
_OLMOE = {
  # Its context is 4,096 tokens, prompt and response.
  "v6e:2x4": _Slice(
    devices=8,
    fsdp=2,
    expert=4,
    decoding=8,
    pages=7168,  # of 7,352 that the plan allows
    rows=2,
  ),
}

# The first slice of a variant is its default.
SLICES = {
  "qwen3-30b-a3b": _QWEN3_30B,
  "qwen3-30b-a3b-2507": _QWEN3_30B,
  "qwen3-coder-30b-a3b": _QWEN3_30B,
  "qwen3-235b-a22b": _QWEN3_235B,
  "qwen3-235b-a22b-2507": _QWEN3_235B,
  "qwen3-coder-480b-a35b": _QWEN3_480B,
  "olmoe-1b-7b": _OLMOE,
}

_ARGUMENTS = ("checkpoint", "questions", "eval", "variant", "topology")

# Releases that think before they answer, unless the template is told otherwise.
# The others either never do, or always.
_HYBRID = ("qwen3-30b-a3b", "qwen3-235b-a22b")
_THINKING_TOKENS = 8192  # a response with fewer has no room for it


def get_config(arg: str = "") -> ConfigDict:
  """arg: words with commas between: `debug`, and any of `_ARGUMENTS`, each with
  `=` and its value."""
  words = [word for word in arg.split(",") if word]
  given = dict(word.split("=", 1) for word in words if "=" in word)
  flags = {word for word in words if "=" not in word}
  unknown = sorted((given.keys() - {*_ARGUMENTS}) | (flags - {"debug"}))
  if unknown:
    raise ValueError(
      f"{unknown[0]}: expected debug, or one of {_list(_ARGUMENTS)}"
    )
  variant = given.get("variant", "qwen3-30b-a3b")
  if variant not in SLICES:
    raise ValueError(f"variant={variant}: expected one of {_list(SLICES)}")
  slices = SLICES[variant]
  topology = given.get("topology", next(iter(slices)))
  if topology not in slices:
    raise ValueError(
      f"topology={topology}: expected one of {_list(slices)} with"
      f" variant={variant}"
    )
  checkpoint, questions = given.get("checkpoint"), given.get("questions")
  if bool(checkpoint) != bool(questions) or ("eval" in given and not questions):
    raise ValueError(
      f"{arg}: expected checkpoint= and questions=, or neither of them and no"
      " eval="
    )
  c = _sized(variant, slices[topology])
  if flags:
    common.shrink(c)
  if checkpoint:
    _train_on(c, checkpoint, questions, given.get("eval", ""))
    if variant in _HYBRID and slices[topology].new_tokens < _THINKING_TOKENS:
      c.data.template_args = "enable_thinking=False"
  return c


def _list(names) -> str:
  return ", ".join(names)


def _train_on(c: ConfigDict, checkpoint, questions, held_out) -> None:
  """The keys of a run on maths questions, at any size."""
  c.model.checkpoint = checkpoint
  c.data.source = _source(questions)
  c.data.eval_source = _source(held_out)
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


def _source(file: str) -> str:
  """A file as `data.source` names it; other sources as they are."""
  if not file or ":" in file.replace("://", ""):
    return file
  return ("parquet:" if file.endswith(".parquet") else "jsonl:") + file


def _sized(variant: str, where: _Slice) -> ConfigDict:
  c = common.get_config()
  c.num_steps = 500
  c.model.variant = variant
  c.model.keep = where.keep
  c.model.lora.rank = where.lora_rank
  c.mesh.data = -1
  c.mesh.fsdp = where.fsdp
  c.mesh.expert = where.expert
  c.sampler_mesh.expert = where.decoding
  c.sampler_mesh.tensor = where.decoding_tensor

  c.data.prompts = where.prompts
  c.data.max_prompt_length = 1024
  c.rollout.group_size = where.group_size
  c.sampler.max_new_tokens = where.new_tokens
  c.learner.minibatches = 4  # GSPO, sec. 5.1
  c.learner.micro_batch_size = where.rows * where.devices
  c.log.instruments = where.instruments

  # All responses decode at once: most end soon, and make room in the pool.
  c.continuous_batching.slots = where.prompts * where.group_size
  c.continuous_batching.page_size = 128  # a TPU's lanes
  c.continuous_batching.num_pages = where.pages

  # Adapters take about ten times the learning rate of all weights.
  c.optim.learning_rate = 1e-5 if where.lora_rank else 1e-6
  c.optim.warmup_steps = 20
  c.eval.prompts = 512
  c.eval.samples = 8
  if where.prompts * where.group_size < 1024:
    # Each evaluation would be as many responses as eight iterations.
    c.eval.every = 20
    c.eval.samples = 4
  return c
