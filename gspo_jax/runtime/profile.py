"""A profile of some iterations, for TensorBoard, XProf or Perfetto."""

import contextlib
from collections.abc import Iterator

import jax
from etils import epath

from gspo_jax.runtime import multihost


class Profile:
  """A context manager that traces iterations with `jax.profiler`.

  Process 0 alone writes its trace: the devices of the others do the same work.
  The trace has the calls of jitted functions on the host, but not those of
  Python functions, which would slow the host down.

  Args:
    iterations: the first one and the last one; () for none.
    folder: where to write.
  """

  def __init__(self, iterations: tuple[int, ...], folder: epath.Path):
    active = iterations and multihost.is_primary()
    self._first, self._last = iterations if active else (0, -1)
    self._folder, self._runs = folder, False

  def __enter__(self) -> "Profile":
    return self

  def __exit__(self, *exception) -> None:
    if self._runs:
      jax.profiler.stop_trace()
      self._runs = False
      print(f"profile: {self._folder}", flush=True)

  @contextlib.contextmanager
  def iteration(self, step: int) -> Iterator[None]:
    """Goes around an iteration."""
    if not self._first <= step <= self._last:
      yield
      return
    if not self._runs:
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0
      jax.profiler.start_trace(self._folder, profiler_options=options)
      self._runs = True
    with jax.profiler.StepTraceAnnotation("iteration", step_num=step):
      yield
    if step == self._last:
      self.__exit__()
