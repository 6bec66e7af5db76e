"""Launches one run of preferences on a shared machine: `python -m … @ dpo.toml`, as `sft_local` does for SFT."""

from medarc_rl.launchers.sft_local import main
from prime_rl.configs.dpo import DPOConfig

if __name__ == "__main__":
    main(DPOConfig)
