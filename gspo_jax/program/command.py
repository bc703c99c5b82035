"""The flags of a command, and its exit codes."""

import ast
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from gspo_jax import configs
from gspo_jax.program import config_keys
from gspo_jax.record.identity import flatten
from gspo_jax.runtime.errors import UserError, complain, nearest

START = (
  "python -m gspo_jax.main --config=configs/tiny_cpu.py --workdir=runs/tiny"
)
CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "A file of configs/ or your own, perhaps with :argument.",
  lock_config=True,
)
WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where checkpoints, metrics and samples go."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "HOST:PORT where process 0 listens; not on a TPU."
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "Processes of the job.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Which of them this is, from 0.", lower_bound=0
)
_COMPILATION_CACHE = flags.DEFINE_string(
  "compilation_cache",
  None,
  'A folder that keeps compiled programs for the next run; "": none. By '
  "default JAX_COMPILATION_CACHE_DIR, else ~/.cache/gspo_jax/compiled.",
)

_CONFIGS = Path(configs.__file__).parent.resolve()
_READER = config_flags.config_flags.__file__
_WRAPS = "whilst parsing config file|an earlier failure to load"  # its errors
_EXIT_CODES = (
  "Exit codes: 0 done; 2 a mistake of the caller's, in one line; anything else "
  "is a fault, with its traceback."
)


def run(work: Callable[[], int | None], start: str, doc: str) -> None:
  """Parses the flags (see `parse`), calls `work`, and exits with its code."""

  def quietly(argv):
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)  # INFO has much of Orbax, tokamax
    return work()

  try:
    app.run(quietly, flags_parser=lambda argv: parse(argv, start, doc))
  except UserError as error:
    sys.exit(complain(error))


def on_hosts(work: Callable[[], int | None]) -> int | None:
  """Joins the other processes, if there are any; returns the code of `work`.

  After a UserError the code is 2. Any other error ends a job of several
  processes with 1. `work` returns the same code on every process.
  """
  # Not at the top: JAX takes seconds, and a wrong flag is found without it.
  if "jax" not in sys.modules:
    print("loading jax", file=sys.stderr, flush=True)
  from gspo_jax.runtime import compilation_cache, multihost

  multihost.start(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  compilation_cache.enable(_COMPILATION_CACHE.value)
  try:
    code = work()
  except multihost.AgreedError as error:
    return complain(error) if multihost.is_primary() else 2
  except UserError as error:  # perhaps of this process alone
    return complain(error)
  except Exception as error:
    multihost.end_job(error)
    raise
  # A process that ends without it waits at most 30 s for the others' save.
  multihost.barrier()
  return code


def parse(argv: list[str], start: str = START, doc: str = "") -> list[str]:
  """Parses the flags of a command; `doc` says what it does, for --help.

  `start` is an example with all flags that it requires. `--config=tiny_cpu`,
  `--config=tiny_cpu.py` and `--config=configs/tiny_cpu.py` name a file of the
  package, unless such a file is in the current folder. A tuple may be typed
  without quotes: `=gsm8k,format`. --help prints all flags and keys, and exits.
  """
  usage = f"see {start.partition(' --')[0]} --help"
  logging.set_verbosity(logging.ERROR)  # a file that is read twice warns twice
  config = None
  try:
    argv = _with_config_path(argv)
    # A separate FlagValues: absl defines the flags of overrides only once.
    first = flags.FlagValues()
    holder = config_flags.DEFINE_config_file(
      "config", flag_values=first, sys_argv=[]
    )
    first(argv, known_only=True)
    config = holder.value  # before its overrides; None: not named
    if first["config"].present and not hasattr(config, "to_dict"):
      raise UserError(f"--config: get_config() of the file returned {config}")
    if {"--help", "-help", "-h"} & {*argv}:
      print(_help(config, doc))
      sys.exit(0)
    if config is not None:
      argv = _checked_overrides(argv, flatten(config.to_dict()))
    rest = flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    hint = _meant_flag(error.flagname, config)
    hint = f"--{error.flagname}: no such flag; {hint}" if hint else str(error)
    raise UserError(f"{hint}; {usage}") from error
  except Exception as error:
    is_read = config is not None and not isinstance(error, OSError)
    if not is_read and (of_file := _of_file(error)):
      raise of_file from error
    expected = flags.Error | OSError | ValueError | TypeError
    if isinstance(error, UserError) or not isinstance(error, expected):
      raise
    # ml_collections puts a traceback into its message; the cause comes last.
    cause = str(error).strip().splitlines()[-1]
    raise UserError(f"{cause}; {usage}") from error
  if len(rest) > 1:
    name = rest[1].partition("=")[0].removeprefix("config.")
    hint = _meant_flag(name, config) or "flags are --name=value"
    raise UserError(f"unexpected argument {rest[1]!r}: {hint}; {usage}")
  for name in re.findall(r" --(\w+)=", start):
    if not flags.FLAGS[name].value:
      raise UserError(f"--{name} is missing; for a start: {start}")
  _check_processes()
  return rest


def _with_config_path(argv: list[str]) -> list[str]:
  """The command line with the full path of a config of the package."""
  argv = [*argv]
  for i, flag in enumerate(argv):
    match = re.fullmatch(r"(--?config)(?:=(.*))?", flag, re.DOTALL)
    if not match:
      continue
    if match[2] is not None:
      argv[i] = f"{match[1]}={_config_path(match[2])}"
    elif i + 1 < len(argv):
      argv[i + 1] = _config_path(argv[i + 1])
  return argv


def _config_path(name: str) -> str:
  """`FILE[:ARGUMENT]` of a file that exists, here or in the package."""
  file, colon, argument = name.partition(":")
  path = Path(file)
  if path.is_file():
    return name
  if path.parent in (Path("."), Path("configs")):
    packaged = _CONFIGS / f"{path.name.removesuffix('.py')}.py"
    if packaged.exists():
      return f"{packaged}{colon}{argument}"
  names = {p.name for p in _CONFIGS.glob("[!_]*.py")}
  names = {f"configs/{n}" for n in names - {"common.py", "recipes.py"}}
  near = nearest(f"configs/{path.stem}.py", names)
  raise UserError(f"--config={name}: no such file; {near}")


def _checked_overrides(argv: list[str], keys: dict) -> list[str]:
  """The command line with Python tuples; `keys` maps keys to their defaults."""
  argv = [*argv]
  for i, flag in enumerate(argv):
    override = re.match(r"--?(?:no)?config\.([^=]*)(=?)", flag)
    if not override:
      continue
    key, equals = override.groups()
    if key not in keys:
      hint = config_keys.hint(key, keys)
      raise UserError(f"{flag[:80]}: no such key; {hint}")
    if not isinstance(keys[key], tuple):
      continue
    if equals:
      argv[i] = override[0] + _as_tuple(key, flag[override.end() :], keys[key])
    elif i + 1 < len(argv):
      argv[i + 1] = _as_tuple(key, argv[i + 1], keys[key])
  return argv


def _as_tuple(key: str, text: str, default: tuple) -> str:
  """A tuple in Python's notation, from that notation or from a comma list."""
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = None
  # Stop strings stay as they are typed: `[END]` keeps its brackets, and `4` is
  # a string.
  if key == "sampler.stop":
    strings = value if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(string, str) for string in strings):
      strings = [string for string in text.split(",") if string]
    return repr(tuple(strings))
  if value is None:
    # `name=` belongs to the part before: `overlong:buffer=8,scale=2,format`.
    parts = re.split(r",(?!\s*\w+=)", text.strip("()[] "))
    value = tuple(part.strip() for part in parts if part.strip())
  value = tuple(value) if isinstance(value, tuple | list) else (value,)
  of_words = [isinstance(x, str) for x in (*default, *value)]
  if default and len({*of_words}) > 1:
    kind = "names" if of_words[0] else "numbers"
    raise UserError(
      f"--config.{key}={text}: expected {kind} with commas between"
    )
  return repr(value)


def _help(config, doc: str) -> str:
  """The text of --help: what the command does, its flags, all keys."""
  # Not at the top: it imports JAX.
  from gspo_jax.program.config_reference import describe

  lines = [doc.strip(), "", "Flags:"]
  if "Exit codes" not in doc:
    lines[1:1] = ["", *textwrap.wrap(_EXIT_CODES, 80)]
  for module, ours in flags.FLAGS.flags_by_module_dict().items():
    if module not in (sys.argv[0], "__main__") and "gspo_jax" not in module:
      continue
    for flag in ours:
      unset = flag.default in (None, [])
      value = "" if unset else str(flag.default_as_str).strip("'")
      lines += _entry(f"--{flag.name}={value}", flag.help)
  lines += ["", "Keys of the config, with their values by default:"]
  for key, default, comment in describe(config):
    if default is None:
      lines += ["", *textwrap.wrap(f"{key}: {comment}", 80)]
    else:
      lines += _entry(f"--config.{key}={_typed(default)}", comment)
  return "\n".join(lines)


def _entry(flag: str, comment: str) -> list[str]:
  """Lines of 80 columns, the comment beside the flag if it fits."""
  beside = f"  {flag:<40}  {comment}"
  if len(beside) <= 80:
    return [beside]
  return [f"  {flag}", *(" " * 6 + line for line in textwrap.wrap(comment, 74))]


def _typed(value) -> str:
  """A value as it is typed after `--config.key=`."""
  if isinstance(value, tuple) and not any(isinstance(v, tuple) for v in value):
    return ",".join(map(str, value))
  return str(value)


def _meant_flag(name: str, config) -> str:
  """The question for a key typed without `--config.`; "" if none is near."""
  keys = config_keys.OTHER_NAMES  # without a config: the full list needs JAX
  if config is not None:
    keys = flatten(config.to_dict())
  near = [name] if name in keys else config_keys.near(name, keys)
  return config_keys.did_you_mean(near, "--config.") if near else ""


def _of_file(error: BaseException | None) -> UserError | None:
  """A mistake in a config file, with its line; None: another error."""
  while error is not None:  # the first cause that passed through the file
    text, is_value = str(error), isinstance(error, ValueError)
    wraps = isinstance(error, flags.Error) or re.search(_WRAPS, text)
    if isinstance(error, UserError) and not wraps:
      return error
    trace = traceback.extract_tb(error.__traceback__)
    frames = [f for f in trace if not f.filename.startswith("<")]  # importlib
    readers = [i for i, f in enumerate(frames) if f.filename == _READER]
    own = frames[readers[-1] + 1 :] if readers else []
    own = [f for f in own if f.filename == own[0].filename]
    if readers and not own and isinstance(error, SyntaxError):
      return UserError(f"{error.filename}:{error.lineno}: {error.msg}")
    if readers and not own and "attribute 'get_config'" in text:
      return UserError("--config: the file has no function get_config")
    path = Path(own[0].filename).resolve() if own else Path()
    is_mode = is_value and path.is_relative_to(_CONFIGS)  # a line of ours
    if own and not wraps and not is_mode:
      reason = _reason(error, own[-1].line, trace[-1].filename)
      return UserError(f"{own[-1].filename}:{own[-1].lineno}: {reason}")
    error = error.__cause__ or error.__context__
  return None


def _reason(error: BaseException, line: str | None, raised_in: str) -> str:
  """What is wrong with a line of a config file."""
  from gspo_jax.program.config import all_keys

  text = str(error)
  if types := re.search(r"type <class '(\w+)'> .* <class '(\w+)'>", text):
    example = ', as in ("name",)' if types[2] == "tuple" else ""
    return f"{line}: expected {types[2]}, got {types[1]}{example}"
  # 'paging', or 'Key "ahead" does not exist and ...', or more lines
  key = re.match(r"""['"\\]*(?:Key ")?(\w+)\W""", text + " ")
  if key and "ml_collections" in raised_in:
    return f"{key[1]}: no such key; {config_keys.hint(key[1], all_keys())}"
  return f"{type(error).__name__}: {text}"


def _check_processes() -> None:
  """UserError unless all flags of a job of several processes agree."""
  together = (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)
  missing = [flag.name for flag in together if flag.value is None]
  if len(missing) == len(together):
    return
  where, count = _COORDINATOR.value, _NUM_PROCESSES.value
  if where is None or count is None or _PROCESS_ID.value is None:
    raise UserError(
      f"--{missing[0]} is missing: --coordinator=HOST:PORT --num_processes=N "
      "--process_id=I belong together"
    )
  if not re.fullmatch(r".+:\d+", where):
    raise UserError(f"--coordinator={where}: expected HOST:PORT")
  if _PROCESS_ID.value >= count:
    raise UserError(
      f"--process_id={_PROCESS_ID.value}: expected 0 to {count - 1}, under "
      "--num_processes"
    )
