"""Whether the job will have the secrets that the config needs. Only names are shown."""

from __future__ import annotations

import netrc
from collections.abc import Iterator, Mapping

from medarc_rl.readiness.rows import Row, failed, ok
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig

WANDB_VARIABLE = "WANDB_API_KEY"
_WANDB_HOST = "api.wandb.ai"


def token_rows(config: SFTConfig | RLConfig, env: Mapping[str, str]) -> Iterator[Row]:
    """`env` is the job's environment."""
    yield ok("hub token", "HF_TOKEN is set" if env.get("HF_TOKEN") else "no HF_TOKEN: public repositories only")
    sections = (config.trainer, config.orchestrator) if isinstance(config, RLConfig) else (config,)
    if any(section.wandb is not None and not section.wandb.offline for section in sections):
        yield _wandb_row(env)
    for name in _named_variables(config):
        advice = "export it, or write it to the project's .env"
        yield ok("secret", f"{name} is set") if env.get(name) else failed("secret", f"{name} is not set: {advice}")


def _wandb_row(env: Mapping[str, str]) -> Row:
    if env.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return ok("W&B key", f"not needed: WANDB_MODE is {env['WANDB_MODE']}")
    if env.get(WANDB_VARIABLE):
        return ok("W&B key", f"{WANDB_VARIABLE} is set")
    if _has_login():
        return ok("W&B key", "in ~/.netrc")
    advice = "export it, run `wandb login`, or set wandb.offline = true"
    return failed("W&B key", f"{WANDB_VARIABLE} is not set, and ~/.netrc has no login: {advice}")


def _has_login() -> bool:
    try:
        return netrc.netrc().authenticators(_WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _named_variables(config: SFTConfig | RLConfig) -> list[str]:
    """Variables that the config names for secret headers."""
    return list(config.orchestrator.client.headers_from_env.values()) if isinstance(config, RLConfig) else []
