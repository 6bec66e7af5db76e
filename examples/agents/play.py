# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=1.60"]
# ///
"""An agent in a process that the run does not know: it starts sessions over HTTP, plays them, and sets their rewards.

    uv run examples/agents/play.py [--port 8123] [--sessions 32] [--key-file FILE]

It may start before the run, and ends after it. The log of the run's orchestrator names the file with its key.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from openai import APIConnectionError, AsyncOpenAI, AuthenticationError, RateLimitError

WAIT_S = 10
"""Seconds for which the run holds a request to start a session, if no attempt waits."""
PAUSE_S = 1.0


async def play(started: dict[str, Any], starter: AsyncOpenAI) -> float:
    """One session: ask the model with the plain client, and end the session with its reward."""
    # A copy shares the connections. A new client would load the certificates of the machine again, for 50 ms.
    client = starter.with_options(base_url=started["base_url"], api_key=started["api_key"])
    text = started["task"]["text"]
    messages: Any = [{"role": "user", "content": text}]
    completion = await client.chat.completions.create(model=started["model"], messages=messages)
    answer = completion.choices[0].message.content or ""
    reward = SequenceMatcher(None, answer, text[::-1]).ratio()
    await client.post("/rl/end_session", body={"reward": reward}, cast_to=dict[str, Any])
    return reward


async def played(client: AsyncOpenAI, key_file: Path, patience_s: float, rewards: list[float]) -> None:
    """Play one session after the other, until the run cannot be reached for `patience_s`."""
    last_seen_s = time.monotonic()
    while time.monotonic() - last_seen_s < patience_s:
        try:
            # Read again each time: a run that starts again has another key.
            starter = client.with_options(api_key=key_file.read_text())
            started = await starter.post("/rl/start_session", body={"wait_s": WAIT_S}, cast_to=dict[str, Any])
            last_seen_s = time.monotonic()
            rewards.append(await play(started, starter))
        except RateLimitError:  # no attempt waits: the trainer is at work
            last_seen_s = time.monotonic()
        except (APIConnectionError, AuthenticationError, OSError):
            # Not there yet, or its end; or the run gave the session up.
            await asyncio.sleep(PAUSE_S)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8123, help="agent_port of the run")
    parser.add_argument("--key-file", type=Path, help="default: where the run keeps the key of this port")
    parser.add_argument("--sessions", type=int, default=32, help="at a time")
    parser.add_argument("--patience-s", type=float, default=120, help="how long to wait for a run that does not answer")
    args = parser.parse_args()
    folder = Path(os.environ.get("PRIME_RL_RUNTIME_DIR") or f"/tmp/prime-rl-{os.getuid()}")
    key_file = args.key_file or folder / f"agents-{args.port}.key"
    rewards: list[float] = []
    base_url = f"http://127.0.0.1:{args.port}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="in the file", max_retries=0) as client:
        everybody = (played(client, key_file, args.patience_s, rewards) for _ in range(args.sessions))
        await asyncio.gather(*everybody)
    sys.stdout.write(f"{len(rewards)} sessions; mean reward {sum(rewards) / max(1, len(rewards)):.3f}\n")


if __name__ == "__main__":
    asyncio.run(main())
