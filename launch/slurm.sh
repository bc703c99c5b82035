#!/usr/bin/env bash
#SBATCH --job-name=gspo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@900
#SBATCH --requeue
#SBATCH --open-mode=append
# One process on each node of a Slurm job. launch/README.md.
#
#   GSPO_WORKDIR=/shared/runs/gpu sbatch launch/slurm.sh --config=my_config.py
#
# Arguments are flags of gspo_jax.main. $GSPO_PYTHON is its Python, by default
# .venv/bin/python of the folder where sbatch was called.
set -euo pipefail
: "${GSPO_WORKDIR:?a folder or bucket that every node sees}"

export JAX_COMPILATION_CACHE_DIR=$GSPO_WORKDIR/compilation_cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Jobs that share a node listen on ports of their own.
coordinator=$first:$((20000 + SLURM_JOB_ID % 10000))

# Slurm may send SIGTERM to this shell, too: wait for the processes all the same.
trap : TERM
code=0
# shellcheck disable=SC2016  # srun sets both for each process
srun bash -c \
  'exec "$@" --num_processes="$SLURM_NTASKS" --process_id="$SLURM_PROCID"' \
  gspo "${GSPO_PYTHON-.venv/bin/python}" -u -m gspo_jax.main \
  --workdir="$GSPO_WORKDIR" --coordinator="$coordinator" "$@" || code=$?
# 75: a SIGTERM has saved the run, and the same job goes on with it.
if ((code == 75)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
