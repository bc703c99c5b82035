"""A reward model: a sequence classifier that scores responses on the devices.

Ouyang et al. 2022 (arXiv 2203.02155, sec. 3.5): a language model whose output
matrix is replaced by one row, r(x, y), read at the last token of a response y
to a prompt x. It is never updated here.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

from gspo_jax import model
from gspo_jax.data import tokenizers
from gspo_jax.data.prompt_batch import PromptConfig
from gspo_jax.model import hf
from gspo_jax.rewards.pool import MODEL, Rewards
from gspo_jax.rewards.reward import LARGEST, Response
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError, how_to_download
from gspo_jax.runtime.mesh_jit import MeshJit

_SHORTEST = 128  # tokens of a row; longer rows have a power of two
_NAME = MODEL[:-1]


class RewardModel:
  """Scores conversations: the messages of a prompt, and the response.

  The folder's own tokenizer and chat template write the text: of the system
  prompt, the history, the instruction with the problem, and the response
  without its stop token, but decoded from the policy's. A conversation longer
  than the model's `max_position_embeddings` (with its rotary scaling) is not
  cut: it has no reward, and counts for `reward.max_failed`.

  Args:
    folder: a `*ForSequenceClassification` of transformers with one label.
    prompt_config: how the policy's prompts are made.
    mesh: of the trainer.
    dtype: of activations and weights on the devices.
    rows: conversations of a forward pass at most, over all devices.

  Raises:
    UserError: no such model, with its tokenizer, is in the folder.
  """

  def __init__(
    self,
    folder: str,
    prompt_config: PromptConfig,
    mesh: jax.sharding.Mesh,
    *,
    dtype: str,
    rows: int,
  ):
    self.cfg = config(folder, dtype)
    self._folder, self._prompts, self._mesh = folder, prompt_config, mesh
    self._tokenizer = tokenizers.load(folder)
    self._limit = hf.context_length(folder)
    self._pad = hf.pad_token(folder)
    if self._tokenizer.vocab_size > self.cfg.vocab_size:
      raise UserError(
        f"{folder}: the tokenizer has {self._tokenizer.vocab_size} tokens and "
        f"the model room for {self.cfg.vocab_size}"
      )
    places = model.shardings(model.shapes(self.cfg), mesh)
    # Read in float32, before the policy and its optimizer take their memory.
    with jax.set_mesh(mesh):
      weights = hf.load_hf(folder, self.cfg, shardings=places)
    cast = functools.partial(model.parameters.cast, cfg=self.cfg)
    self.params = MeshJit(cast, mesh, out_shardings=places)(weights)
    shards = sharding.row_shards(mesh)
    self._rows = -(-rows // shards) * shards
    self._places = (
      NamedSharding(mesh, sharding.TOKENS),
      NamedSharding(mesh, sharding.ROWS),
    )
    cfg = self.cfg
    self._score = MeshJit(
      lambda params, *rows: model.scores(params, cfg, *rows),
      mesh,
      in_shardings=(places, *self._places),
      out_shardings=sharding.replicated(mesh),
    )

  def ids(self, response: Response) -> list[int]:
    """The tokens whose last one has the score of transformers."""
    messages = self._prompts.messages_of(response.problem)
    said = {"role": "assistant", "content": response.text}
    ids = self._tokenizer.conversation([*messages, said])
    # transformers takes the last token that is not the padding.
    while len(ids) > 1 and ids[-1] == self._pad:
      ids.pop()
    if self._limit is not None and len(ids) > self._limit:
      raise UserError(
        f"{len(ids)} tokens of prompt and response, more than the "
        f"{self._limit} of {self._folder}"
      )
    return ids

  def __call__(self, responses: Mapping[int, Response], size: int) -> Rewards:
    """The rewards [size] of all hosts' responses; call it on each host.

    `responses` are this host's, by row.
    """
    ids, reasons = {}, []
    for row, response in responses.items():
      try:
        ids[row] = self.ids(response)
      except Exception as error:  # no process may raise alone
        reasons.append(f"{_NAME}: {error}")
    rows: dict[int, list[int]] = {}
    for part in multihost.allgather_json(list(ids.items())):
      rows |= dict(part)
    values = np.full(size, np.nan, np.float32)
    # Rows of about one length share a pass.
    order = sorted(rows, key=lambda row: (len(rows[row]), row))
    for start in range(0, len(order), self._rows):
      batch = order[start : start + self._rows]
      values[batch] = self._scores([rows[row] for row in batch])
    failed = ~(np.abs(values) <= LARGEST)  # NaN too
    if failed[order].any():
      reasons.append(f"{_NAME}: a score is not a number up to {LARGEST:g}")
    values = np.where(failed, np.float32(0), values)
    return Rewards(values, {_NAME: values}, failed, tuple(reasons))

  def _scores(self, batch: Sequence[Sequence[int]]) -> np.ndarray:
    """The scores of some rows, in one pass of a few possible shapes."""
    longest = max(map(len, batch))
    T = max(_SHORTEST, 1 << (longest - 1).bit_length())
    context = self._mesh.shape["context"]
    T = -(-T // context) * context
    tokens = np.full((self._rows, T), self._tokenizer.pad_id, np.int32)
    lengths = np.ones(self._rows, np.int32)
    for row, ids in enumerate(batch):
      tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    given = map(multihost.to_global, (tokens, lengths), self._places)
    return multihost.to_host(self._score(self.params, *given))[: len(batch)]


def config(folder: str, dtype: str) -> model.ModelConfig:
  """The sizes of the reward model in a folder; UserError if there is none."""
  if not epath.Path(folder).is_dir():
    raise UserError(f"{folder!r}: no such folder{how_to_download(folder)}")
  return hf.reward_config(folder, dtype=dtype, remat="none")


def folder_of(names: Sequence[str]) -> str:
  """The folder of the reward model among `reward.names`, or ""."""
  models = [name for name in names if name.startswith(MODEL)]
  return models[0].removeprefix(MODEL) if models else ""
