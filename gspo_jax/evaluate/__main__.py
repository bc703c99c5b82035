"""The command that puts sets of questions to a policy, as the papers do.

  python -m gspo_jax.evaluate --config=configs/tiny_cpu.py --checkpoint=DIR \\
    --set=AIME24=aime24.jsonl --set=MATH500=math500.jsonl

DIR is a Hugging Face folder, a workdir of a run (its newest checkpoint), or one
step of it, WORKDIR/checkpoints/STEP. gspo_jax/evaluate/benchmarks.py lists the
benchmarks and the columns of their files. Model, prompt, lengths and
temperature come from the config (`--config.sampler.temperature=0.6
--config.sampler.top_p=0.95`); keys that only training uses are not checked. A
batch holds the problems of a benchmark, or as many of them as give
`data.prompts * sampler.group_size` responses, as in training; it is filled up
to a multiple of the devices.

Prints a table; --out (by default DIR/evaluation) gets results.json, and
answers.jsonl as the answers come: the same command again goes on from there.

Exit codes: 0 done; 2 a mistake of the caller's, in one line; anything else is a
fault, with its traceback.
"""

import sys

from absl import app, flags

from gspo_jax.evaluate import summary
from gspo_jax.evaluate.evaluator import evaluate
from gspo_jax.program import command
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError

_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "A Hugging Face folder, a workdir, or a step of it."
)
_SETS = flags.DEFINE_multi_string("set", [], "NAME=FILE; may be repeated.")
_SAMPLES = flags.DEFINE_integer(
  "samples",
  None,
  "Answers a question; else the set's own.",
  lower_bound=1,
  upper_bound=1000,  # estimates hold binomials in floats
)
_LIMIT = flags.DEFINE_integer(
  "limit", None, "Only the first so many questions of a set.", lower_bound=1
)
_REWARD = flags.DEFINE_string(
  "reward", "", "Judges, not the sets' own; as in code:total=20."
)
_OUT = flags.DEFINE_string("out", None, "A folder for answers and results.")


def main() -> None:
  """The console's entry."""
  try:
    app.run(_command, flags_parser=_parse)
  except UserError as error:
    sys.exit(command.complain(error))


def _parse(argv):
  return command.parse(
    argv,
    "python -m gspo_jax.evaluate --config=configs/tiny_cpu.py "
    "--checkpoint=runs/tiny --set=GSM8K=test.jsonl",
  )


def _command(argv) -> int:
  def work():
    summaries = evaluate(
      flags.FLAGS.config,
      _CHECKPOINT.value,
      _SETS.value,
      out=_OUT.value or f"{_CHECKPOINT.value}/evaluation",
      samples=_SAMPLES.value,
      limit=_LIMIT.value,
      reward=_REWARD.value,
    )
    multihost.print_once(summary.render(summaries))
    return 0

  return command.on_hosts(work)


if __name__ == "__main__":
  main()
