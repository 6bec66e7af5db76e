"""`medarc_train migrate`: rewrites a config of another version of PRIME-RL for this one."""
