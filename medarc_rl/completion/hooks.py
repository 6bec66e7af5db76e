"""What a shell reads to complete a program, and where it is installed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

Shell = Literal["bash", "zsh", "fish"]
SHELLS: tuple[Shell, ...] = get_args(Shell)
VARIABLE = "MEDARC_COMPLETE"
"""Environment variable with the name of the shell that asks a program for candidates."""
LINE_VARIABLE = "MEDARC_COMPLETE_LINE"
"""bash: the command line up to the cursor, because bash splits words at `=`, `@` and `:`."""

_BASH = """\
# Completion of PROGRAM for bash.
_PROGRAM_completion() {
    local answer program="${COMP_WORDS[0]/#\\~/$HOME}" line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=()
    while IFS= read -r answer; do
        COMPREPLY+=("$answer")
    done < <(MEDARC_COMPLETE=bash MEDARC_COMPLETE_LINE="$line" "$program" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[/.=] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _PROGRAM_completion PROGRAM
"""

_ZSH = """\
#compdef PROGRAM
# Completion of PROGRAM for zsh.
_PROGRAM_completion() {
    local answer value text
    local -a whole whole_shown begun begun_shown
    while IFS= read -r answer; do
        value=${answer%%$'\\t'*} text=${answer#*$'\\t'}
        if [[ $value == *[/.=] ]]; then
            begun+=("$value") begun_shown+=("$value${text:+  -- $text}")
        else
            whole+=("$value") whole_shown+=("$value${text:+  -- $text}")
        fi
    done < <(MEDARC_COMPLETE=zsh ${(Q)~words[1]} "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    compadd -l -d whole_shown -a whole
    compadd -l -S '' -d begun_shown -a begun
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _PROGRAM_completion PROGRAM
"""

_FISH = """\
# Completion of PROGRAM for fish.
function __PROGRAM_completion
    set -lx MEDARC_COMPLETE fish
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    $before[1] $before[2..-1] "$current" 2>/dev/null
end
complete -c PROGRAM -f -a '(__PROGRAM_completion)'
"""

_HOOKS: Mapping[Shell, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def hook(shell: Shell, program: str) -> str:
    """The code that makes a shell complete a program."""
    return _HOOKS[shell].replace("PROGRAM", program)


def install(shell: Shell, program: str, env: Mapping[str, str], home: Path) -> list[Path]:
    """Install the completion for this user; returns the files that were written. A second time changes nothing more.

    Raises:
        OSError: a file cannot be written.
    """
    if shell == "fish":
        configs = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
        file = configs / "fish" / "completions" / f"{program}.fish"
    else:
        data = Path(env.get("XDG_DATA_HOME") or home / ".local" / "share")
        file = data / "medarc-rl" / f"{program}.{shell}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(hook(shell, program), encoding="utf-8")
    if shell == "fish":
        return [file]
    start = home / ".bashrc" if shell == "bash" else Path(env.get("ZDOTDIR") or home) / ".zshrc"
    line = f"source {shlex.quote(str(file))}"
    earlier = start.read_text(encoding="utf-8", errors="replace") if start.exists() else ""
    if line not in earlier.splitlines():
        with start.open("a", encoding="utf-8") as writing:
            writing.write(f"{'' if not earlier or earlier.endswith(chr(10)) else chr(10)}{line}\n")
    return [file, start]


def is_asked(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a shell has started this process to learn candidates."""
    return env.get(VARIABLE) in SHELLS
