"""Jitted functions that know their mesh."""

import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class OnMesh:
  """A jitted function that is traced and called in the context of a mesh."""

  jitted: Callable
  mesh: jax.sharding.Mesh

  def __call__(self, *args):
    with jax.set_mesh(self.mesh):
      return self.jitted(*args)

  def lower(self, *args):
    """For ahead-of-time compilation; arguments may be shapes."""
    with jax.set_mesh(self.mesh):
      return self.jitted.lower(*args)
