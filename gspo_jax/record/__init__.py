"""What a run writes and reads again. Nothing here is specific to RL.

checkpoint     save, verify and restore the training state
identity       whether a checkpoint belongs to the same run; `flatten`
kept           finished states for equal runs, in the user's cache folder
metric_writer  metrics to stdout, JSON lines and TensorBoard
wandb_run      metrics to Weights & Biases
profile        a trace of some iterations
run_files      the files of a workdir, written and read
json_lines     reads JSON-lines files
json_file      reads a file with one JSON object
progress       progress of slow work, and what JAX compiles
"""
