"""What JAX compiles: lines of progress, and the time that it takes."""

import threading

from jax import monitoring

from gspo_jax.runtime.progress import Progress

# JAX reports the start of a stage as a scalar, and its end as a duration.
_STAGES = {
  "/jax/core/compile/jaxpr_trace_duration": "tracing",
  "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
  "/jax/core/compile/backend_compile_duration": "compiling",
}
AFTER = 1.0  # seconds before the first line of a compilation
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Compilations:
  """A context manager that says what JAX compiles.

  What is compiled for over a second has lines, and what is traced or lowered
  for over ten:

    compiling update: 1 s so far
    compiling update: 11 s so far
    compiling update: 34 s

  The time, also that of reading JAX's compilation cache, is added to
  `Progress.compile_seconds`.
  """

  def __init__(self):
    self._local = threading.local()  # .stages: those that this thread is in

  def __enter__(self) -> "Compilations":
    monitoring.register_scalar_listener(self._begin)
    monitoring.register_event_listener(self._event)
    monitoring.register_event_duration_secs_listener(self._end)
    return self

  def __exit__(self, *exception) -> None:
    monitoring.unregister_scalar_listener(self._begin)
    monitoring.unregister_event_listener(self._event)
    monitoring.unregister_event_duration_listener(self._end)

  def _begin(self, event: str, _, fun_name: str = "", **more) -> None:
    if event in _STAGES:
      stage = _STAGES[event]
      stage = Progress(
        f"{stage} {_plain(fun_name)}",
        after=AFTER if stage == "compiling" else None,
      )
      self._stages.append(stage.__enter__())

  def _event(self, event: str, **more) -> None:
    if event == _CACHE_HIT and self._stages:
      self._stages[-1].note = ", from the compilation cache"

  def _end(self, event: str, seconds: float, **more) -> None:
    if event in _STAGES and self._stages:
      self._stages.pop().__exit__(None, None, None)
      if not self._stages:  # an outer stage includes the inner ones
        Progress.compile_seconds += seconds

  @property
  def _stages(self) -> list[Progress]:
    return self._local.__dict__.setdefault("stages", [])


def _plain(fun_name: str) -> str:
  """The name of a function: `update` of "jit(_update)"."""
  return fun_name.removeprefix("jit(").removesuffix(")").strip("_")
