"""The sampler's functions, each jitted beside its shardings."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding

from gspo_jax import model
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.program import abstract, settings
from gspo_jax.program.config import Config
from gspo_jax.program.rules import multiple
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError, prefixed
from gspo_jax.runtime.mesh_jit import MeshJit
from gspo_jax.sampler import continuous, samples, static
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.functions import SamplerFunctions, SeparateDevices
from gspo_jax.sampler.samples import SamplerConfig, samples_sharding
from gspo_jax.sampler.stop_strings import StopStrings

# Slots of a shard to serve a policy, where continuous_batching.slots is 0.
_SLOTS = 16


def sampler_functions(
  config: Config,
  cfg: model.ModelConfig,
  tokenizer: Tokenizer,
  policy: model.Params,
  mesh: jax.sharding.Mesh,
  devices: Sequence[jax.Device] = (),
) -> SamplerFunctions:
  """The sampler's functions, for an abstract policy; compiles nothing yet."""
  sampling = settings.sampler_config(config, tokenizer)
  batching = config.continuous_batching
  turns = bool(config.rollout.environment)
  sampler_mesh = _sampler_mesh(config, mesh, policy, devices)
  prompts = config.data.prompts
  place_on = functools.partial(samples_sharding, cfg, sampling)
  separate, params = None, policy
  if devices:  # of the sampler alone; else it uses the devices of `mesh`
    params = abstract.sharded(policy, sampler_mesh)
    places = [place_on(m, turns=turns) for m in (mesh, sampler_mesh)]
    separate = _separate_devices(
      policy, params, cfg, mesh, sampler_mesh, places
    )
    mesh = sampler_mesh
  place, one_turn = place_on(mesh, turns=turns), place_on(mesh)
  replicated = sharding.replicated(mesh)
  rows = shards_of_rows(config, mesh, devices)
  most = -(-config.eval.prompts // rows) * rows * config.eval.samples
  slots = min(batching.slots or prompts * config.rollout.group_size, most)
  build = functools.partial(
    _build_sampler,
    config,
    cfg,
    params_sharding=abstract.shardings(params),
    mesh=mesh,
    sampler_mesh=sampler_mesh,
  )

  return SamplerFunctions(
    generate=build(sampling, batching.slots),
    respond=build(_single(sampling), slots, by_row=True),
    shards_of_rows=rows,
    merge_groups=MeshJit(
      samples.merge_groups,
      mesh,
      in_shardings=(place, place, replicated),
      out_shardings=place,
    ),
    take_groups=MeshJit(
      functools.partial(samples.take_groups, cfg=cfg, sampler=sampling),
      mesh,
      most=2,  # a batch, and what stays in flight
      in_shardings=(one_turn, replicated),
      out_shardings=one_turn,
    ),
    empty_samples=MeshJit(
      functools.partial(
        samples.empty_samples,
        prompts * config.rollout.max_sequences,
        config.data.max_prompt_length,
        cfg,
        sampling,
        turns=turns,
      ),
      mesh,
      out_shardings=place,
    ),
    stop=sampling.stop if isinstance(sampling.stop, StopStrings) else None,
    mesh=mesh,
    separate=separate,
  )


def serving_sampler(
  config: Config,
  cfg: model.ModelConfig,
  tokenizer: Tokenizer,
  policy: model.Params,
  mesh: jax.sharding.Mesh,
) -> ContinuousSampler:
  """Programs of engines that serve a policy, whatever the rollouts are."""
  sampler_mesh = _sampler_mesh(config, mesh, policy, ())
  shards = sharding.batch_shards(sampler_mesh)
  sampler = _build_sampler(
    config,
    cfg,
    _single(settings.sampler_config(config, tokenizer)),
    config.continuous_batching.slots or _SLOTS * shards,
    by_row=True,
    params_sharding=abstract.shardings(policy),
    mesh=mesh,
    sampler_mesh=sampler_mesh,
  )
  if sampler.shares_rows:
    raise UserError(
      "sampler_mesh: several processes have the same rows; expected expert x "
      "tensor within one process, for a request is of one"
    )
  return sampler


def _single(sampling: SamplerConfig) -> SamplerConfig:
  """For single responses, which no update reads."""
  return dataclasses.replace(
    sampling, group_size=1, record_routing=False, kept_ids=0, head_ids=0
  )


def _build_sampler(
  config, cfg, sampling, slots: int, *, by_row: bool = False, **places
):
  if not slots:
    return static.build_static_sampler(cfg, sampling, **places)
  batching, width = config.continuous_batching, config.data.max_prompt_length
  if not batching.slots:  # then its sizes are those of no rollout
    pages = -(-width // batching.page_size)
    chunk = min(batching.prefill_chunk, pages * batching.page_size)
    batching = dataclasses.replace(batching, prefill_chunk=chunk, num_pages=0)
  return continuous.build_continuous_sampler(
    cfg,
    sampling,
    batching=dataclasses.replace(batching, slots=slots),
    max_prompt_length=width,
    by_row=by_row,
    **places,
  )


def shards_of_rows(
  config: Config, mesh: jax.sharding.Mesh, devices: Sequence[jax.Device] = ()
) -> int:
  """The least number of rows that both training and decoding can split."""
  meshes = mesh, _decoding_mesh(config, mesh, devices)
  return math.lcm(*map(sharding.batch_shards, meshes))


def _decoding_mesh(config, mesh, devices=()):
  expert = config.sampler_mesh.expert or mesh.shape["expert"]
  tensor = config.sampler_mesh.tensor or mesh.shape["tensor"]
  if len(devices) == mesh.size:
    mesh = sharding.beside(mesh, devices)
  elif devices:
    mesh = sharding.make_mesh(devices, data=-1)
  return sharding.reshape_mesh(mesh, expert=expert, tensor=tensor)


def _sampler_mesh(config, mesh, params, devices):
  """The mesh of decoding: its steps gather no weights."""
  sampler_mesh = _decoding_mesh(config, mesh, devices)
  with prefixed("on sampler_mesh"):
    model.shardings(params, sampler_mesh)
  shards = sharding.batch_shards(sampler_mesh)
  multiple("data.prompts", config.data.prompts, "sampler_mesh", shards)
  return sampler_mesh


def _separate_devices(
  policy, params, cfg, here, there, places
) -> SeparateDevices:
  """Moves weights and samples between the meshes `here` and `there`."""
  # Weights are cast before they are sent.
  cast = functools.partial(model.parameters.cast, cfg=cfg)
  same = lambda samples: samples
  weights = abstract.sharded(jax.eval_shape(cast, params), there)
  return SeparateDevices(
    weights=weights,
    in_transit=weights
    if here.size == there.size
    else abstract.sharded(jax.eval_shape(cast, policy), here),
    sync_weights=_move(cast, here, there, abstract.shardings(params)),
    to_trainer=_move(same, there, here, places[0]),
    to_sampler=_move(same, here, there, places[1]),
  )


def _move(prepare, source_mesh, mesh, target):
  """A function that moves `prepare(arrays)` from one mesh to another."""
  if mesh.size != source_mesh.size:
    prepare = MeshJit(prepare, source_mesh)
    return lambda arrays: jax.device_put(prepare(arrays), target)
  # Meshes of one size: the source lays the arrays out as on the target. Then
  # each device sends its part to one device of the same process; `device_put`
  # alone works only within one process.
  beside = sharding.beside(mesh, source_mesh.devices.flat)
  pairs = dict(zip(beside.devices.flat, mesh.devices.flat, strict=True))
  laid_out = jax.tree.map(lambda s: NamedSharding(beside, s.spec), target)
  prepare = MeshJit(prepare, source_mesh, out_shardings=laid_out)

  def send(x, sharding):
    parts = [
      jax.device_put(shard.data, pairs[shard.device])
      for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

  return lambda arrays: jax.tree.map(send, prepare(arrays), target)
