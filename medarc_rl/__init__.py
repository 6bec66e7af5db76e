"""The wrapper: MedARC's commands for the engine in `prime_rl`, on this machine and on Slurm."""
