"""Entry point of preference training: `python -m prime_rl.trainer.preferences.train @ dpo.toml`, once per process."""

from prime_rl.configs.dpo import DPOConfig
from prime_rl.trainer.sft.train import main

if __name__ == "__main__":
    main(DPOConfig)
