"""What a run writes and reads again. Nothing here is specific to RL.

Other wings take these modules:
  checkpoint     Checkpoints: save, verify and restore the training state
  identity       whether a checkpoint belongs to the same run; `flatten`
  metric_writer  MetricWriter and to_scalars: stdout, JSON lines, TensorBoard
  wandb_run      WandbRun: the metrics in Weights & Biases
  profile        Profile: a trace of some iterations
  run_files      the files of a workdir, as they are written and read
  json_lines     reads JSON-lines files
  json_file      reads a file that is one JSON object
  progress       Progress: how far slow work is; Compilations: what JAX compiles
"""

__all__ = (
  "checkpoint",
  "identity",
  "json_file",
  "json_lines",
  "metric_writer",
  "profile",
  "progress",
  "run_files",
  "wandb_run",
)
