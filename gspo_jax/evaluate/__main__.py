"""The command that evaluates a policy on benchmarks.

  python -m gspo_jax.evaluate --config=configs/tiny_cpu.py --checkpoint=DIR \\
    --set=AIME24=aime24.jsonl --set=MATH500=math500.jsonl

DIR is a Hugging Face folder, the workdir of a run (its newest checkpoint), or
one step of it, WORKDIR/checkpoints/STEP. gspo_jax/evaluate/benchmarks.py lists
the benchmarks; their files are read like training files. Model, prompt, lengths
and temperature come from the config (`--config.sampler.temperature=0.6
--config.sampler.top_p=0.95`); keys that only training uses are not checked. A
benchmark is sampled in one batch, or in a few batches of equal size with at
most `data.prompts * rollout.group_size` responses, as in training. `--reward`
names another reward, as `reward.names` does. It gets the columns of the file; a
reward for groups gets all samples of a problem.

It prints a table. Each benchmark gets a folder in --out (by default
DIR/evaluation) with results.json, and with answers.jsonl, which grows while
responses are scored. Repeat the command to continue an interrupted evaluation.
"""

from absl import flags

from gspo_jax.program import command

_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "A Hugging Face folder, a workdir, or a step of it."
)
_SETS = flags.DEFINE_multi_string(
  "set", [], "NAME=FILE: a benchmark and its problems; may be repeated."
)
_SAMPLES = flags.DEFINE_integer(
  "samples",
  None,
  "Responses to each problem; by default the number usual for the benchmark.",
  lower_bound=1,
  upper_bound=1000,  # the estimators compute binomials in floats
)
_LIMIT = flags.DEFINE_integer(
  "limit", None, "Only the first problems of each benchmark.", lower_bound=1
)
_REWARD = flags.DEFINE_string(
  "reward",
  "",
  "Scores all benchmarks, as in code:total=20 or my_module.reward.",
)
_OUT = flags.DEFINE_string("out", None, "A folder for responses and results.")


_START = (
  "python -m gspo_jax.evaluate --config=configs/tiny_cpu.py "
  "--checkpoint=runs/tiny --set=GSM8K=test.jsonl"
)


def main() -> None:
  command.run(lambda: command.on_hosts(_evaluate), _START, __doc__)


def _evaluate() -> None:
  from gspo_jax.evaluate import summary
  from gspo_jax.evaluate.evaluator import evaluate
  from gspo_jax.runtime import multihost

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


if __name__ == "__main__":
  main()
