"""The reward `multiple_choice`: finds the option on which a completion settles, and compares it with the answer."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prime_rl.environments.rewards.text import (
    accepted_answers,
    last_answer_tag,
    last_boxed,
    plain_signs,
    without_thinking,
)

UNNAMED = "ABCDEFGHIJ"
"""Letters of options whose number is not known."""


_MAX_CHARACTERS, _HEAD = 10_000, 2_000
"""Of a longer text, the start and the end are read. An answer stands in one of them."""

_MOST = len(UNNAMED)
_WINDOW = 150
"""Characters before and after a letter in which a text may reject it."""


def multiple_choice(completion_text: str, answer: Any, choices: Any = None) -> float:
    """1 if the completion chooses `answer`: a letter, a number from 0, or the text of one of `choices`.

    The choice is the last `<answer>` or `\\boxed{}`; else the last statement such as "the answer is (B)" or "option b
    is correct"; else the only letter that stands alone at the start, at the end or in brackets; else the only choice
    whose text occurs. An option that the completion rejects is no choice, nor are several. Of an answer of several
    letters (`A, C`) all must be chosen. `answer` may be a list of accepted answers.
    """
    options = _options(choices)
    found = chosen(completion_text, options)
    return float(bool(found) and any(found == _letters_of(each, options) for each in accepted_answers(answer)))


def chosen(completion: str, options: Sequence[str] = ()) -> frozenset[str]:
    """The letters that a completion chooses. Empty if it chooses none, or does not decide."""
    text = without_thinking(completion)
    letters = string.ascii_uppercase[: len(options)] if options else UNNAMED
    for part in (last_answer_tag(text), last_boxed(text)):
        if part is not None:
            short = _plain(part)
            return _short(short, letters) or _stated(short, letters) or _by_text(short, options)
    text = _plain(text if len(text) <= _MAX_CHARACTERS else f"{text[:_HEAD]}\n{text[_HEAD - _MAX_CHARACTERS :]}")
    for find in (_stated, _short, _concluded, _alone):
        if found := find(text, letters):
            return found if "?" not in found else frozenset()
    return _by_text(text, options)


def _plain(text: str) -> str:
    """The text without marks of Markdown and LaTeX, with signs in one way."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|rm)\s*\{([^{}]*)\}", r" \1 ", text)
    return re.sub(r"[*_`$]+(?=\W|[A-Za-z]\b|$)|(?<!\w)[*_`$]+|[*_`$]+(?!\w)|\\[()\[\]]", "", plain_signs(text)).strip()


# A letter that may stand for an option: `B`, `b)`, `(B)`, `[b].`, but no part of a word.
_MARKED = r"[(\[{]\s*([A-Za-z])\s*[)\]}]"
_BARE = r"(?<!\w)(?<!\w')([A-Za-z])(?!\w|'\w|\+|-\w|\.\w)"
_LETTER = rf"(?:{_MARKED}|{_BARE})"
_CONNECTED = r"(?:because|since|as|and|or|for|which|due|with|is|was|would|given|based|by|in this|not)\b"
_AS_WORD = re.compile(rf"^(?:\s+(?!{_CONNECTED})[a-z]|\s+(?=I\b))")
"""What follows `A`, `a` and `I` where they are words: "a drug", "I think"."""
_SPECIES = re.compile(
    r"^\.\s*(?:coli|difficile|diff|albicans|trachomatis|perfringens|botulinum|tetani|jejuni|diphtheriae|neoformans|"
    r"cereus|burgdorferi|pertussis|anthracis|fragilis|henselae|melitensis|pylori|influenzae|ducreyi|fumigatus|"
    r"baumannii|lumbricoides|faecalis|faecium|histolytica|granulosus|latum|gondii|lamblia|jirovecii)\b"
)
"""What follows the letter of a genus, as in *E. coli*."""
_REJECTED_BEFORE = re.compile(
    r"(?:\b(?:not|n't|nor|neither|never|except|excludes?|excluded|excluding|eliminates?|eliminated|eliminating|"
    r"rejects?|rule[sd]? out|ruling out|instead of|rather than|unlike|wrong|incorrect|avoid|without|no)\b|n't)"
    r"(?:[\s,:\"'(]|\b(?:is|are|the|an?|by|option|options|choice|choices|answer|answers|and|or|nor|to|be|give|use|[a-z])\b)*$",
    re.IGNORECASE,
)
_REJECTED_AFTER = re.compile(
    r"^[)\]}:,]*(?:[ \t,/(]|\b(?:and|or|nor|option|choice|[a-z])\b|[)\]])*"
    r"(?:(?:(?!\b(?:because|since|while|whereas|but|as)\b)[^.,;\n]){0,60}?\b)?"
    r"(?:(?:is|are|was|were|would be|seems?|looks?|can be|be)\s+(?:also\s+|both\s+|all\s+|clearly\s+|therefore\s+)*"
    r"(?:not|never|wrong|incorrect|false|excluded|eliminated|ruled out|unlikely|contraindicated|inappropriate|rejected)"
    r"|(?:isn|aren|wasn|doesn|don|can|couldn|won|wouldn)'?t\b|does not|do not|cannot|can not)",
    re.IGNORECASE,
)
_STATEMENT = re.compile(
    r"(?P<kind>\b(?:[a-z]+\s+)?)(?:answer|choice|option|selection|response)s?\b"
    r"(?P<is>(?:\s*(?:is|are|would be|should be|must be|will be|:|=|->|-))+)"
    r"(?:\s|\b(?:the|option|choice|letter|answer|probably|likely|most likely|clearly|therefore|thus|indeed|surely)\b"
    r"|[:\"'])*"
    rf"{_LETTER}",
    re.IGNORECASE,
)
_DENIED = re.compile(r"wrong|incorrect|worst|other|not|no\b", re.IGNORECASE)
"""Before `answer`."""
_VERDICT = re.compile(
    rf"(?:\b(?:option|choice|answer)\s+)?{_LETTER}[).:]?\s+(?:is|would be|must be|seems|remains)\s+"
    r"(?:therefore\s+|thus\s+|clearly\s+|indeed\s+|definitely\s+)?(?:the\s+)?"
    r"(?:most\s+likely\s+|most\s+appropriate\s+|single\s+)?(?:correct|right|best|true|answer|most appropriate)\b",
    re.IGNORECASE,
)
_ALL_OF = re.compile(
    r"\b((?:[A-Z](?:\s*,\s*|\s*,?\s+and\s+)){1,9}[A-Z])\s+are\s+(?:both\s+|all\s+)?(?:the\s+)?(?:correct|right|true|answers)\b"
)
_PICKED = re.compile(
    r"(?:(?:^|[.\n]\s*)(?:choose|select|pick)\b|\b(?:I|I'd|I'll|I'm|we|we'd)\s+(?:would\s+|will\s+|'d\s+)?"
    r"(?:choose|chose|pick|picked|select|selected|go with|going with|went with|answer|say|opt for)\b)"
    rf"(?:\s|\b(?:the|option|choice|letter|answer)\b|[:\"'])*{_LETTER}",
    re.IGNORECASE,
)
_CONCLUSION = re.compile(
    r"\b(?:therefore|thus|hence|so|leaves|leaving|conclusion|must be|it's|it is)\b"
    r"(?:\s|[,:\"']|\b(?:it|it's|is|must be|be|we|have|us with|only|the|option|choice)\b)*"
    rf"{_LETTER}(?=[\s.!\"')\]]*(?:$|\n))",
    re.IGNORECASE,
)
_MORE = re.compile(
    r"^[)\]}.]?\s*(?P<joint>,\s*and|,\s*or|,|/|&|\+|\band\b|\bor\b)\s*(?:option\s+|choice\s+)?" + _LETTER, re.IGNORECASE
)
_LEAD = re.compile(
    r"^(?:(?:the\s+)?(?:final\s+)?(?:answer|option|choice|letter)\s*(?:is)?\s*[:=]?\s*)+|^both\s+", re.IGNORECASE
)


def _short(text: str, letters: str) -> frozenset[str]:
    """Of a text that is a letter, or begins with one and a mark: `B`, `(b)`, `B. aspirin`, `A, C`, `option a`."""
    head = _LEAD.sub("", text.strip("\"'"))
    if re.fullmatch(r"[A-Z]{2,10}", head) and list(head) == sorted(set(head)) and set(head) <= set(letters):
        return frozenset(head)
    match = re.match(_LETTER, head)
    if match is None:
        return frozenset()
    several = _with_more(head, match, letters)
    if len(several) > 1:
        end = re.sub(rf"^(?:{_LETTER}|[\s,/&+.]|\band\b|\bor\b)+", "", head, flags=re.IGNORECASE)
        return several if not end.strip() else frozenset()
    rest = head[match.end() :]
    listed = re.findall(rf"^\s*(?:{_MARKED}|([A-Za-z])[.):])\s", text, re.MULTILINE)
    is_list = len({(one or other).upper() for one, other in listed}) > 1
    is_marked = match[1] is not None or re.match(
        r"\s*$|\s*[.:)](?:\s|$)|\s*-\s|\s*\n|,?\s+(?:because|since|as|(?:and|but)\s+not)\b", rest
    )
    if not is_marked or is_list or _SPECIES.match(rest) or _REJECTED_AFTER.match(rest[:_WINDOW]):
        return frozenset()
    return frozenset() if _others(rest, several, letters) else several


def _others(rest: str, letters_so_far: frozenset[str], letters: str) -> bool:
    """Whether other options follow, in brackets or by that word: then the text discusses them."""
    more = re.findall(rf"{_MARKED}|\b(?:option|choice)\s+([A-Za-z])\b(?!')", rest, re.IGNORECASE)
    return any((one or other).upper() in set(letters) - letters_so_far for one, other in more)


def _stated(text: str, letters: str) -> frozenset[str]:
    """The last statement: "the answer is (B)", "option b is correct", "I choose B"."""
    found: list[tuple[int, frozenset[str]]] = []
    for pattern in (_STATEMENT, _VERDICT, _PICKED):
        for match in pattern.finditer(text):
            if pattern is _STATEMENT and re.search(
                r"wrong|incorrect|worst|other|not|no\b", match["kind"], re.IGNORECASE
            ):
                continue
            if (chosen := _with_more(text, match, letters)) and not (pattern is not _VERDICT and _is_word(text, match)):
                found.append((match.end(), chosen))
    for match in _ALL_OF.finditer(text):
        found.append((match.end(), frozenset(re.findall(r"\b[A-Z]\b", match[1])) & frozenset(letters)))
    return max(found, key=lambda each: each[0])[1] if found else frozenset()


def _concluded(text: str, letters: str) -> frozenset[str]:
    """The last line if it is a letter, or a conclusion such as "so it must be C."."""
    alone = [match for line in text.splitlines() if (match := re.fullmatch(rf"\s*{_LETTER}[.)\s]*", line))]
    if alone and alone[-1].string.strip() == text.rstrip().rpartition("\n")[2].strip():
        named = frozenset().union(*(_with_more(each.string, each, letters) for each in alone))
        return named if len(named) == 1 else frozenset("?")
    found = [_with_more(text, match, letters) for match in _CONCLUSION.finditer(text) if not _is_rejected(text, match)]
    return found[-1] if found else frozenset()


def _alone(text: str, letters: str) -> frozenset[str]:
    """The only letter in brackets, or after `option`, that is not rejected."""
    found = set()
    for match in re.finditer(rf"{_MARKED}|\b(?:option|choice)\s+([A-Za-z])\b(?!')", text, re.IGNORECASE):
        letter = (match[1] or match[2]).upper()
        if letter in letters and letter not in found and not _is_rejected(text, match):
            found.add(letter)
    return frozenset(found) if len(found) == 1 else frozenset("?") if found else frozenset()


def _with_more(text: str, match: re.Match[str], letters: str) -> frozenset[str]:
    """The letter of a match, with those that follow after `,` and `and`. Empty with `or`, which does not decide."""
    first = next(each for each in reversed(match.groups()) if each and len(each) == 1).upper()  # of _MARKED or _BARE
    if first not in letters:
        return frozenset()
    found, rest = {first}, text[match.end() :]
    while len(found) < _MOST and (more := _MORE.match(rest[:_WINDOW])):
        letter = next(each for each in (more[2], more[3]) if each).upper()
        if letter not in letters or (more[3] in ("a", "I") and _AS_WORD.match(rest[more.end() :])):
            break
        if "or" in more["joint"].lower() or "/" in more["joint"]:
            return frozenset("?")
        if letter in found:  # a list that repeats letters chooses none
            break
        found.add(letter)
        rest = rest[more.end() :]
    return frozenset(found)


def _is_word(text: str, match: re.Match[str]) -> bool:
    """Whether the letter is the article, the pronoun or a genus."""
    letter, rest = text[match.end() - 1], text[match.end() :]
    if letter not in string.ascii_letters:  # in brackets
        return False
    if letter.islower() and letter != "a" and re.match(r"\s+[a-z]", rest) and not re.match(rf"\s+{_CONNECTED}", rest):
        return True
    return (letter in "aAI" and bool(_AS_WORD.match(rest))) or bool(_SPECIES.match(rest))


def _is_rejected(text: str, match: re.Match[str]) -> bool:
    before = re.split(r"[.;!?\n](?:\s|$)", text[max(match.start() - _WINDOW, 0) : match.start()])[-1]
    return bool(_REJECTED_BEFORE.search(before) or _REJECTED_AFTER.match(text[match.end() : match.end() + _WINDOW]))


def _by_text(text: str, options: Sequence[str]) -> frozenset[str]:
    """The letter of the only choice that equals the text; else of the only one in it that is not rejected."""
    plain = plain_signs(text).strip().strip(".").casefold()
    plain_options = [plain_signs(each).strip().strip(".").casefold() for each in options]
    equal = [index for index, option in enumerate(plain_options) if option and option == plain]
    if len(equal) == 1:
        return frozenset(string.ascii_uppercase[equal[0]])
    spans = [
        (match, index) for index, option in enumerate(plain_options) if option for match in _occurrences(option, plain)
    ]
    longest = [
        (match, index)
        for match, index in spans
        if not any(
            other.start() <= match.start() and match.end() <= other.end() and len(other[0]) > len(match[0])
            for other, _ in spans
        )
    ]
    found = {index for match, index in longest if not _is_rejected(plain, match)}
    return frozenset(string.ascii_uppercase[each] for each in found) if len(found) == 1 else frozenset()


def _occurrences(option: str, text: str) -> Iterator[re.Match[str]]:
    """Where a choice stands in a text, not as a part of a longer word or number: not `5` in `-5`, `0.5` and `<5`."""
    before = r"(?<![\w.,/^<>=+-])" if option[0].isdigit() or option[0] == "." else r"(?<!\w)"
    return re.finditer(rf"{before}{re.escape(option)}(?!\w|[+-](?!\w)|[./,%^]\d|%)", text)


def _options(choices: Any) -> list[str]:
    """The texts of the choices, in the order of their letters."""
    if isinstance(choices, str):  # a cell of a CSV file
        choices = accepted_answers(choices)
    if isinstance(choices, Mapping):  # {"A": "…", "B": "…"}, or {"text": […], "label": […]} as in ARC
        choices = choices["text"] if "text" in choices else [choices[key] for key in sorted(choices)]
    return [str(each) for each in choices if each is not None] if choices is not None else []


def _letters_of(answer: Any, options: Sequence[str]) -> frozenset[str]:
    if isinstance(answer, int) and not isinstance(answer, bool):
        return frozenset(string.ascii_uppercase[answer : answer + 1]) if answer >= 0 else frozenset()
    text = _plain(str(answer))
    if len(text) > 1 and (found := _by_text(text, options)) and text.casefold() in map(str.casefold, options):
        return found
    if text.isdigit() and text not in options:
        return frozenset(string.ascii_uppercase[int(text)]) if int(text) < 26 else frozenset()
    return _short(text, string.ascii_uppercase) or _by_text(text, options)
