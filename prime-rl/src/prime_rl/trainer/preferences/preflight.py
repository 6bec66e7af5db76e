"""Reports what a run of `dpo` would train on: `medarc_train dpo CONFIG --preflight`."""

from prime_rl.configs.dpo import DPOConfig
from prime_rl.trainer.sft.preflight import main

if __name__ == "__main__":
    main(DPOConfig)
