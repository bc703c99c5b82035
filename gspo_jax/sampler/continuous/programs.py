"""What an engine compiles: its jitted functions, and the shapes of their calls.

Dimension letters as in `continuous/__init__`. A shard is a part of the devices;
no two shards share rows. "Own" shards are those of this host.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.model.cache import has_states
from gspo_jax.runtime import multihost
from gspo_jax.runtime.sharding import Tree
from gspo_jax.sampler.continuous.config import PROMPT_ROWS
from gspo_jax.sampler.continuous.jit import Functions
from gspo_jax.sampler.continuous.paged_decode import SegmentPlan
from gspo_jax.sampler.decode_params import decode_params_sharding
from gspo_jax.sampler.samples import Prompts

_MAX_PREFILL_BATCH = 8  # most prefixes of one prefill on each shard


@dataclasses.dataclass(frozen=True)
class Programs(Functions):
  batch_sharding: jax.sharding.NamedSharding
  jitted: SimpleNamespace  # of `jit_sampler`

  @functools.cached_property
  def own(self) -> list[int]:
    """The shards on this host's devices; two hosts may have the same."""
    parts = self.batch_sharding.addressable_devices_indices_map((self.shards,))
    shards = range(self.shards)
    return sorted(
      {s for (part,) in filter(None, parts.values()) for s in shards[part]}
    )

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self.batch_sharding.mesh  # type: ignore[return-value]  # of devices

  def prefill_batch(self, T: int) -> int:
    """Prefixes of T tokens in a shard's prefill; a size of 1 also compiles.

    Their temporary cache takes at most an eighth of the memory of all pages.
    """
    tokens = self.sizes.num_pages * self.sizes.page_size
    return max(1, min(_MAX_PREFILL_BATCH, tokens // (8 * T)))

  @functools.cached_property
  def shares_rows(self) -> bool:
    """Whether several processes have the same rows."""
    places = self.batch_sharding.devices_indices_map((self.shards,))
    owners = {
      (part.start, d.process_index)  # type: ignore[attr-defined]  # of jaxlib
      for d, (part,) in places.items()
    }
    return len(owners) > len({start for start, _ in owners})

  def played_rows(self, size: int) -> list[int]:
    """The rows, of so many, that no other process answers for."""
    like = multihost.to_global(np.zeros(size, np.int8), self.batch_sharding)
    return [*multihost.local_rows(like)]

  def to_devices(self, tree: Tree) -> Tree:
    """Global arrays from the rows of this host's own shards, joined."""
    if len(self.batch_sharding.device_set) == 1:
      return tree  # NumPy arrays, which nobody may write to afterwards

    def put(x):
      n = len(x) // len(self.own)

      def part(index):
        begin, end, _ = index[0].indices(n * self.shards)
        at = self.own.index(begin // n) * n
        return x[at : at + end - begin]

      return jax.make_array_from_callback(
        (n * self.shards, *x.shape[1:]), self.batch_sharding, part
      )

    return jax.tree.map(put, tree)

  def lower(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    continues: bool = False,
    subsets: bool = False,
  ) -> dict[str, jax.stages.Lowered]:
    """Lowers a prefill of the longest prompts, and a segment.

    If it `continues` responses, they are a part of the prompts. With `subsets`,
    also the segments of fewer slots, as "generate SLOTS".
    """
    shape, jitted = jax.ShapeDtypeStruct, self.jitted
    whole = lambda *dims: shape(dims, np.int32, sharding=self.batch_sharding)
    decode_params = jitted.decode_params.lower(params)
    params = jax.tree.map(
      lambda x, place: shape(x.shape, x.dtype, sharding=place),
      decode_params.out_info,
      decode_params_sharding(self.cfg, self.mesh),
    )
    empty = jitted.empty_samples.lower(len(prompts.lengths)).out_info
    state, samples = jitted.begin.lower(empty).out_info
    slots = dict.fromkeys(SegmentPlan.__dataclass_fields__, state.num_tokens)
    slots |= {"table": state.pages.table}
    slots |= {"active": state.pages.active, "new": state.pages.active}
    slots |= {"params": state.params}
    sources = None
    if has_states(self.cfg):
      sources = whole(self.batching.slots), whole(PROMPT_ROWS * self.shards)
    else:
      slots["prompt_row"] = ()
    T = self.buckets(continues=continues)[-1]
    Q, C = self.prefill_batch(T) * self.shards, T // self.sizes.page_size
    decode = lambda compute_slots, drafts: jitted.decode.lower(
      params,
      state,
      samples,
      SegmentPlan(**slots),
      compute_slots,
      shape((), np.int32),
      key,
      drafts,
    )
    lowered = {
      "decode_params": decode_params,
      "prefill": jitted.prefill.lower(
        params, state, whole(Q, T), whole(Q), whole(Q, C), None, sources
      ),
      "generate": decode(None, 0),
    }
    for m in self.compute_sizes[1:] if subsets else ():
      lowered[f"generate {m}"] = decode(whole(m), self.drafts(m))
    return lowered

  def describe(self, *, continues: bool) -> str:
    slots = " or ".join(map(str, self.compute_sizes))
    buckets = ", ".join(map(str, self.buckets(continues=continues)))
    return (
      f"continuous batching: {slots} slots, "
      f"{self.sizes.num_pages * self.shards} pages of {self.sizes.page_size} "
      f"tokens; prefills of up to {buckets} tokens"
    )
