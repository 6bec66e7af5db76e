"""Started by `test_places_in_the_data.py`: an SFT run that also writes which samples it trains on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.sft.data import packer
from prime_rl.trainer.sft.run import run
from prime_rl.utils.pydantic_config import parse_argv_or_exit


def main() -> None:
    config = parse_argv_or_exit(SFTConfig)
    trained: list[list[int]] = []
    lay_out = packer.lay_out

    def recorded(samples, *arguments):
        trained.extend(sample.token_ids.tolist() for sample in samples)
        return lay_out(samples, *arguments)

    packer.lay_out = recorded
    code = run(config)
    Path(config.output_dir, f"trained_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(trained))
    raise SystemExit(code)


with leaving_at_once():
    main()
