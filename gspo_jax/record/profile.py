"""Traces some iterations for TensorBoard, XProf or Perfetto."""

import contextlib
import importlib.util
from collections.abc import Iterator

import jax
from etils import epath

from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError


def require_profiler(iterations: tuple[int, ...]) -> None:
  """Raises UserError where `jax.profiler` would crash the process.

  `gspo_jax.plan` needs libtpu 0.0.51, and JAX 0.10.2 loads it on any machine.
  Its profiler then ends in a segmentation fault. On a TPU, JAX chooses libtpu
  itself.
  """
  if (
    importlib.util.find_spec("libtpu")
    and not jax.config.jax_platforms  # type: ignore[attr-defined]  # JAX adds it
    and jax.default_backend() != "tpu"
  ):
    backend = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    raise UserError(
      f"log.profile={iterations}: the package libtpu without a TPU crashes "
      f"jax.profiler; set JAX_PLATFORMS={backend} in the environment"
    )


class Profile(contextlib.ExitStack):
  """A context manager that traces iterations (first, last); () for none.

  Only process 0 writes a trace: the other devices do the same work. Python
  calls are not traced, because that slows the host.
  """

  def __init__(self, iterations: tuple[int, ...], folder: epath.Path):
    super().__init__()
    active = iterations and multihost.is_primary()
    self._first, self._last = iterations if active else (0, -1)
    self._folder, self._runs = folder, False

  @contextlib.contextmanager
  def iteration(self, step: int) -> Iterator[None]:
    if not self._first <= step <= self._last:
      yield
      return
    if not self._runs:
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0
      jax.profiler.start_trace(self._folder, profiler_options=options)
      self._runs = True
      self.callback(self._stop)
    with jax.profiler.StepTraceAnnotation("iteration", step_num=step):
      yield
    if step == self._last:
      self.close()

  def _stop(self) -> None:
    jax.profiler.stop_trace()
    print(f"profile: {self._folder}", flush=True)
