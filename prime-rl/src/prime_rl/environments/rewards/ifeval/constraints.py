"""The 25 instructions of IFEval (Zhou et al., 2023), by id. Each takes the response and the instruction's arguments."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence

from prime_rl.environments.rewards.ifeval.counting import holds, occurrences, paragraphs, sentences, words
from prime_rl.environments.rewards.ifeval.language import is_in

Check = Callable[..., bool]
CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
DIVIDER = r"\s?\*\*\*\s?"
RESPONSE_DIVIDER = "******"


def existence(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(re.escape(each), text, re.IGNORECASE) for each in keywords)


def frequency(text: str, keyword: str, frequency: int, relation: str | None = "at least") -> bool:
    return holds(occurrences(keyword, text), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(occurrences(each, text) for each in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str | None = "at least") -> bool:
    return holds(Counter(text.lower())[letter.lower()], let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    return is_in(text, language)


def number_sentences(text: str, num_sentences: int, relation: str | None = "at least") -> bool:
    return holds(len(sentences(text)), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs divided by `***`. An empty one between two others counts as none at all."""
    parts = [part.strip() for part in re.split(r"\s?(?:\*\*\*|\* \* \*)\s?", text)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def number_words(text: str, num_words: int, relation: str | None = "at least") -> bool:
    return holds(len(words(text)), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs divided by empty lines: their number, and the first word of one of them."""
    parts = paragraphs(text)
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = words(parts[nth_paragraph - 1])
    return bool(first) and first[0].lower() == first_word.strip().lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]*\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """A line that begins with `P.S.` or `P.P.S`, with or without spaces."""
    letters = [re.escape(each) for each in postscript_marker if each.isalnum()]
    marker = r"[.\s]*".join(letters)
    return re.search(rf"^\s*{marker}\b", text, re.IGNORECASE | re.MULTILINE) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Lines that begin with `*` or `-`, and are neither bold nor a divider."""
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-))[ \t]*[^\s*\-].*$", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str, options: Sequence[str] | str = CHOICES) -> bool:
    known = options.split("/") if isinstance(options, str) else options
    return any(re.search(rf"(?<!\w){re.escape(each.strip())}", text, re.IGNORECASE) for each in known if each.strip())


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """`*text*` and `**text**` on one line."""
    bold = re.findall(r"\*\*([^\n*]+)\*\*", text)
    plain = re.findall(r"(?<!\*)\*([^\n*]+)\*(?!\*)", text)
    return sum(bool(each.strip()) for each in [*bold, *plain]) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Headings of a name and a number."""
    return len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?[\dIVX]+\s?", text)) >= num_sections


def json_format(text: str) -> bool:
    plain = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(plain)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(each.strip("<> \t") for each in re.findall(r"<<[^\n]+>>", text))


def two_responses(text: str) -> bool:
    """Two different responses with six asterisks between them."""
    parts = [part.strip() for part in text.split(RESPONSE_DIVIDER)]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    plain = text.strip()
    return len(plain) > 1 and plain[0] == plain[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str | None = "at least") -> bool:
    return holds(sum(each.isupper() for each in words(text)), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and is_in(text.lower(), "en")


def english_lowercase(text: str) -> bool:
    return text.islower() and is_in(text, "en")


def no_comma(text: str) -> bool:
    return "," not in text


IFEVAL: dict[str, Check] = {
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
}
