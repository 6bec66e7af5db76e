"""Asks the hub for one repository: `python -m medarc_rl.checks.lookup model|dataset NAME`.

Prints JSON, or one line on stderr with exit code 1. Runs in a separate process, because a name server that does not
answer blocks the process that asks.
"""

from __future__ import annotations

import json
import os
import sys

from medarc_rl.errors import MedarcError

TIMEOUT_S = 15.0


def main() -> None:
    kind, name = sys.argv[1:]
    try:
        sys.stdout.write(json.dumps({"files": _count_of_files(kind, name)}))
    except MedarcError as refusal:
        sys.stderr.write(f"{refusal}\n")
        raise SystemExit(1) from None


def _count_of_files(kind: str, name: str) -> int:
    """Number of files of a repository that this user can download. Raises MedarcError."""
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        api = HfApi()
        info = api.model_info if kind == "model" else api.dataset_info
        files = info(name, timeout=TIMEOUT_S).siblings
        api.auth_check(name, repo_type=kind)
    except GatedRepoError:
        raise MedarcError(
            "access on the hub is restricted: request it on the repository's page, and use that account's token; "
            f"{_token()}"
        ) from None
    except RepositoryNotFoundError:
        raise MedarcError(f"the hub has no {kind} with this name, or it is private; {_token()}") from None
    except HFValidationError as error:
        raise MedarcError(f"it is not a hub id: {error}") from None
    except (HTTPError, OSError) as error:
        raise MedarcError(f"the hub cannot be reached from here: {type(error).__name__}: {error}") from None
    return len(files or [])


def _token() -> str:
    return "HF_TOKEN is set" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set: set it, or use --auto-auth"


if __name__ == "__main__":
    main()
