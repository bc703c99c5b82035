"""Serves a policy over HTTP, in the form of OpenAI's API.

  python -m gspo_jax.serve --config=configs/tiny_cpu.py --workdir=runs/tiny

The newest checkpoint of --workdir answers at http://HOST:PORT/v1; or a Hugging
Face folder, or one step of a run, with --checkpoint. Model, prompt, lengths and
sampling, where a request does not choose, come from the config. A prompt and
its answer have at most `data.max_prompt_length + sampler.max_new_tokens`
tokens. The URL and a new key are printed once all is compiled; --api_key_file
names a file with keys instead. SIGTERM and Ctrl-C end it. docs/agents.md has
what is served.
"""

import contextlib
from pathlib import Path

from absl import flags

from gspo_jax.program import command
from gspo_jax.runtime.errors import UserError, needs_extra, with_reason

_CHECKPOINT = flags.DEFINE_string(
  "checkpoint",
  None,
  "A Hugging Face folder, a workdir, or a step of it.",
  allow_override=True,  # a process may import `evaluate`, too
)
_HOST = flags.DEFINE_string(
  "host", "127.0.0.1", "The address to listen at; 0.0.0.0: all of this machine."
)
_PORT = flags.DEFINE_integer(
  "port", 8000, "0: any that is free.", lower_bound=0, upper_bound=65535
)
_KEY_FILE = flags.DEFINE_string(
  "api_key_file", None, "A file with the keys that clients send, one a line."
)

_START = "python -m gspo_jax.serve --config=configs/tiny_cpu.py"


def main() -> None:
  command.run(lambda: command.on_hosts(_serve), _START, __doc__)


def _serve() -> None:
  # Not at the top: these import JAX, and a package of the extra `serve`.
  with needs_extra("serve", "gspo_jax.serve"):
    from gspo_jax.endpoint.app import Endpoint
    from gspo_jax.endpoint.client import Client
    from gspo_jax.endpoint.server import Server
  import jax

  from gspo_jax.program import load_params, settings
  from gspo_jax.program.config import parse
  from gspo_jax.program.functions import build_program
  from gspo_jax.program.sampler_functions import serving_sampler
  from gspo_jax.runtime.preemption import Preemption

  folder = _CHECKPOINT.value or command.WORKDIR.value
  if not folder:
    raise UserError(
      f"--workdir is missing: expected the workdir of a run, or --checkpoint; "
      f"for a start: {_START} --workdir=runs/tiny"
    )
  keys = read_keys(_KEY_FILE.value) if _KEY_FILE.value else [""]
  config = load_params.with_checkpoint(parse(flags.FLAGS.config), folder)
  mesh, _ = settings.make_meshes(config)
  with jax.set_mesh(mesh):
    program = build_program(config, mesh, training=False, sampling=False)
    tokenizer, key = program.tokenizer, jax.random.key(config.seed)
    sampler = serving_sampler(
      config, program.cfg, tokenizer, program.abstract_policy, mesh
    )
    params = load_params.load(config, program, folder)
    endpoint = Endpoint(tokenizer, sampler.config)
    with (
      Preemption() as preemption,
      Server(endpoint.app, _HOST.value, _PORT.value) as server,
      sampler.open(params, key, sampler.batching.slots) as engine,
      contextlib.suppress(KeyboardInterrupt),
    ):
      print("compiling", flush=True)
      engine.warm_up()
      new = [endpoint.admit(Client(engine, tokenizer), key) for key in keys]
      print(f"base URL: {server.url}", flush=True)
      print(
        f"API key: {f'those of {_KEY_FILE.value}' if keys[0] else new[0]}",
        flush=True,
      )
      engine.run(lambda: preemption.requested)


def read_keys(path: str) -> list[str]:
  """The lines of --api_key_file; UserError unless each is one long word."""
  with with_reason(f"--api_key_file={path}"):
    keys = Path(path).read_text().split("\n")
  keys = [key.strip() for key in keys if key.strip()]
  if not keys or any(len(key) < 16 or len(key.split()) > 1 for key in keys):
    raise UserError(
      f"--api_key_file={path}: expected in each line one word of at least 16 "
      f"letters, got lines of {[*map(len, keys)]}"
    )
  return keys


if __name__ == "__main__":
  main()
