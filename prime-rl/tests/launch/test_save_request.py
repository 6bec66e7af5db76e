"""A checkpoint on demand, by a file."""

import signal
from pathlib import Path

from prime_rl.launch.run import pass_on_save_request
from prime_rl.run.paths import RunPaths


def test_a_touched_file_is_the_signal_that_saves(tmp_path: Path) -> None:
    paths, heard = RunPaths(tmp_path), []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        pass_on_save_request(paths)
        assert heard == []
        paths.save_request.touch()
        pass_on_save_request(paths)
        pass_on_save_request(paths)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert heard == [signal.SIGUSR1]
    assert not paths.save_request.exists()
