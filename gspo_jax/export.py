"""Makes a Hugging Face folder of a run's policy, for transformers to load.

  python -m gspo_jax.export --config=configs/gsm8k_small.py \\
    --workdir=runs/gsm8k --to=exported

`--config` and its overrides as the run had them. The newest checkpoint that is
whole is taken, or that of --workdir=runs/gsm8k/checkpoints/STEP. The folder
holds weights, config.json and the tokenizer; a run that began from a Hugging
Face folder takes over what that one said.

Exit codes: 0 done; 2 a mistake of the caller's, in one line; anything else is a
fault, with its traceback.
"""

import functools
import json
import sys

import jax
from absl import app, flags
from ml_collections import ConfigDict

from gspo_jax.model import hf
from gspo_jax.program import command, load_params
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError

_TO = flags.DEFINE_string("to", None, "The folder; new or empty.")
_DTYPE = flags.DEFINE_string(
  "dtype", "bfloat16", "Of the weights: bfloat16, or float32 to lose nothing."
)


def main() -> None:
  """The console's entry."""
  try:
    app.run(_command, flags_parser=_parse)
  except UserError as error:
    sys.exit(command.complain(error))


def _parse(argv):
  return command.parse(
    argv,
    "python -m gspo_jax.export --config=configs/tiny_cpu.py "
    "--workdir=runs/tiny --to=exported",
  )


def _command(argv) -> int:

  def work():
    export(
      flags.FLAGS.config, flags.FLAGS.workdir, _TO.value, dtype=_DTYPE.value
    )
    return 0

  return command.on_hosts(work)


def export(
  config: ConfigDict, workdir: str, folder: str, *, dtype: str
) -> None:
  """Writes `folder`; on several hosts the first one does.

  Args:
    config: of the run.
    workdir: as `policy.load` takes it.
    folder: must not exist, or be empty.
    dtype: of the weights.

  Raises:
    UserError: no checkpoint there, another model, or `folder` holds something.
  """
  multihost.run_on_all(
    lambda: multihost.is_primary() and hf.require_new(folder, dtype)
  )
  mesh = multihost.run_on_all(lambda: sharding.make_mesh(**config.mesh))
  with jax.set_mesh(mesh):
    made = multihost.run_on_all(lambda: build_program(config, mesh))
    params = load_params.load(config, made, workdir)
  base = config.model.checkpoint or None
  # Else the base's own tokenizer goes along, file by file.
  own = config.data.tokenizer or not base
  add = functools.partial(_add_tokenizer, made.tokenizer) if own else None
  hf.save_hf(params, made.cfg, folder, dtype=dtype, like=base, beside=add)
  multihost.print_once(f"exported to {folder}")


def _add_tokenizer(texts, folder):
  texts.save(folder)
  ids = {"eos_token_id": list(texts.stop_ids), "pad_token_id": texts.pad_id}
  path = folder / "generation_config.json"
  path.write_text(json.dumps(ids, indent=2) + "\n")


if __name__ == "__main__":
  main()
