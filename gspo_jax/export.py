"""Writes a run's policy as a Hugging Face folder that transformers loads.

  python -m gspo_jax.export --config=configs/gsm8k_small.py \\
    --workdir=runs/gsm8k --to=exported

Give the run's `--config` and overrides. The newest complete checkpoint is
written, or one step with --workdir=runs/gsm8k/checkpoints/STEP. The folder has
weights, config.json and the tokenizer. A run that started from a Hugging Face
folder keeps the settings of that folder. Adapters (`model.lora.rank`) are
merged into the weights; `--peft` writes only the adapters, in PEFT's format.
"""

import dataclasses
import functools
import json

import jax
from absl import flags

from gspo_jax import model
from gspo_jax.model import hf
from gspo_jax.program import command, load_params, settings
from gspo_jax.program.config import ConfigDict, parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError

_TO = flags.DEFINE_string("to", None, "The folder; new or empty.")
_DTYPE = flags.DEFINE_string(
  "dtype", "bfloat16", "Of the weights: bfloat16, or float32 to lose nothing."
)
_PEFT = flags.DEFINE_bool(
  "peft", False, "Write the adapters alone, in float32, for PEFT."
)


_START = (
  "python -m gspo_jax.export --config=configs/tiny_cpu.py "
  "--workdir=runs/tiny --to=exported"
)


def main() -> None:
  command.run(lambda: command.on_hosts(_export), _START, __doc__)


def _export() -> None:
  export(
    flags.FLAGS.config,
    flags.FLAGS.workdir,
    _TO.value,
    dtype=_DTYPE.value,
    peft=_PEFT.value,
  )


def export(
  config: ConfigDict,
  workdir: str,
  folder: str,
  *,
  dtype: str,
  peft: bool = False,
) -> None:
  """Writes a new or empty `folder`; on several hosts the first one writes.

  `config` has the run's keys; for `workdir` see `load_params.load`. With `peft`
  only the adapters are written.

  Raises:
    UserError: no checkpoint, another model, or a `folder` that is not empty;
      with `peft`, no adapters, or adapters to weights that are in no Hugging
      Face folder.
  """
  multihost.run_on_all(
    lambda: multihost.is_primary() and hf.require_new(folder, dtype)
  )
  config = multihost.run_on_all(lambda: parse(config))
  if peft:
    _require_base(config)
  mesh, _ = multihost.run_on_all(lambda: settings.make_meshes(config))
  with jax.set_mesh(mesh):
    program = multihost.run_on_all(
      lambda: build_program(config, mesh, training=False)
    )
    params = load_params.load(config, program, workdir)
    if not peft:
      params = load_params.merged(program, params)
  base = config.model.checkpoint
  if peft:
    _, adapters = model.lora.split(params)
    hf.save_peft(adapters, program.cfg, folder, base=base)
  else:
    add_tokenizer = None  # save_hf copies the tokenizer of the base
    if config.data.tokenizer or not base:
      add_tokenizer = functools.partial(_add_tokenizer, program.tokenizer)
    hf.save_hf(
      params,
      dataclasses.replace(program.cfg, lora=None),
      folder,
      dtype=dtype,
      like=base or None,
      beside=add_tokenizer,
    )
  multihost.print_once(f"exported to {folder}")


def _require_base(config) -> None:
  """UserError unless there are adapters to the weights of a folder."""
  if not config.model.lora.rank:
    raise UserError("--peft: expected model.lora.rank above 0, got 0")
  folder, steps = config.model.checkpoint, config.cold_start.steps
  if steps or not folder:
    raise UserError(
      f"--peft with model.checkpoint={folder!r} and cold_start.steps={steps}: "
      "expected a folder and 0, for PEFT loads the weights below the adapters "
      "from that folder; without --peft the adapters are merged"
    )


def _add_tokenizer(tokenizer, folder):
  tokenizer.save(folder)
  ids = {
    "eos_token_id": list(tokenizer.stop_ids),
    "pad_token_id": tokenizer.pad_id,
  }
  text = json.dumps(ids, indent=2) + "\n"
  (folder / "generation_config.json").write_text(text)


if __name__ == "__main__":
  main()
