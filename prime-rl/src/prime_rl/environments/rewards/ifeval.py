"""Rewards for verifiable instructions: IFEval, RLVR-IFEval and the IF multi-constraints data.

Four parts: counting words and sentences; the 54 instructions, each a function of the response and the instruction's
arguments; the two rewards, which read the instructions of a row in any of the three forms; language identification.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from prime_rl.environments.rewards.text import without_thinking

_ABBREVIATIONS = r"(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|approx|Fig|No|Vol|cf|al|a\.m|p\.m|U\.S|Ph\.D)"
_SENTENCE_END = re.compile(r"(?<=[.!?…。！？।])[\"'”’)\]]*(?:\s+|$)|\n\s*\n|(?<=[。！？।])")
AROUND = 0.1
"""Allowed relative difference of a number that must be "around" another; the difference may be 1 in any case."""


def words(text: str) -> list[str]:
    """Runs of letters, digits, inner apostrophes and hyphens: `don't` and `well-known` are one word each."""
    return re.findall(r"\w+(?:['’\-]\w+)*", text)


def sentences(text: str) -> list[str]:
    """Split at `.`, `!`, `?` before a space, and at empty lines. Abbreviations and decimals do not end a sentence."""
    guarded = re.sub(rf"\b({_ABBREVIATIONS})\.", lambda match: match[0].replace(".", "\x00"), text)
    guarded = re.sub(r"\b([A-Z])\.(?=\s+[A-Z])", "\\1\x00", guarded)
    parts = (part.replace("\x00", ".").strip() for part in _SENTENCE_END.split(guarded))
    return [part for part in parts if re.search(r"\w", part)]


def paragraphs(text: str, separator: str = r"\n\s*\n") -> list[str]:
    """Parts between separators, without empty ones."""
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def occurrences(keyword: str, text: str) -> int:
    """Number of times that a keyword or phrase occurs as whole words, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", text, re.IGNORECASE))


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


# The other 29 instructions of the IF multi-constraints data (Pyatkin et al., 2025).


def word_once(text: str, keyword: str) -> bool:
    return occurrences(keyword, text) == 1


def word_count_different_numbers(text: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return holds(occurrences(keyword, text), relation, frequency)


def exclude_word_harder(text: str, keyword: str) -> bool:
    return occurrences(keyword, text) == 0


def paragraphs_divided(text: str) -> bool:
    """Two paragraphs divided by `***`."""
    return len(paragraphs(text, DIVIDER)) == 2


def paragraphs_spaced(text: str) -> bool:
    """Two paragraphs divided by an empty line."""
    return len(paragraphs(text)) == 2


def first_word_sent(text: str, first_word: str) -> bool:
    """Every sentence begins with a word."""
    parts = [words(each) for each in sentences(text)]
    return bool(parts) and all(each[0].lower() == first_word.strip().lower() for each in parts if each)


def first_word_answer(text: str, first_word: str) -> bool:
    return words(text)[:1] != [] and words(text)[0].lower() == first_word.strip().lower()


def last_word_sent(text: str, last_word: str) -> bool:
    """Every sentence ends with a word."""
    parts = [words(each) for each in sentences(text)]
    return bool(parts) and all(each[-1].lower() == last_word.strip().lower() for each in parts if each)


def last_word_answer(text: str, last_word: str) -> bool:
    return words(text)[-1:] != [] and words(text)[-1].lower() == last_word.strip().lower()


def bigram_wrapping(text: str) -> bool:
    """Every two words stand in double angular brackets: `<<I am>> <<at home>>`."""
    groups = re.findall(r"<<([^<>]*)>>", text)
    left = re.sub(r"<<[^<>]*>>", " ", text)
    sizes = [len(each.split()) for each in groups]
    return bool(sizes) and not words(left) and all(size == 2 for size in sizes[:-1]) and sizes[-1] in (1, 2)


def copying_simple(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower() == prompt_to_repeat.strip().lower()


def copying_multiple(text: str, prompt_to_repeat: str, N: int) -> bool:
    """The prompt N times, with six asterisks between."""
    wanted = prompt_to_repeat.strip().lower()
    parts = [part.strip().lower() for part in text.split(RESPONSE_DIVIDER)]
    return len(parts) == N and all(part == wanted for part in parts)


def punctuation_dot(text: str) -> bool:
    return "." not in text


def punctuation_exclamation(text: str) -> bool:
    return "!" not in text


def lowercase_counting(text: str, N: int) -> bool:
    """At most N words in lower case."""
    return sum(each.islower() for each in words(text)) <= N


def letter_counting(text: str, N: int, relation: str | None = None) -> bool:
    return holds(sum(each.isalpha() for each in text), relation, N)


def letter_counting_one(text: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    return holds(Counter(text.lower())[letter.lower()], let_relation, let_frequency)


def counting_composition(text: str, n_sent: int, n_words: int) -> bool:
    """Three paragraphs divided by `***`, each of `n_sent` sentences of `n_words` words."""
    parts = paragraphs(text, DIVIDER)
    counts = [[len(words(sentence)) for sentence in sentences(part)] for part in parts]
    return len(parts) == 3 and all(each == [n_words] * n_sent for each in counts)


def count_unique(text: str) -> bool:
    """No word twice."""
    counts = Counter(each.lower() for each in words(text))
    return bool(counts) and max(counts.values()) == 1


def count_increment_word(text: str, keyword1: str, keyword2: str) -> bool:
    return occurrences(keyword1, text) == 1 and occurrences(keyword2, text) == 2


def palindrome(text: str) -> bool:
    """One word of two letters or more that reads the same from its end."""
    return any(len(each) > 1 and each.isalpha() and each == each[::-1] for each in map(str.lower, words(text)))


def keyword_specific_position(text: str, keyword: str, n: int, m: int) -> bool:
    """A keyword is word m of sentence n."""
    parts = sentences(text)
    found = words(parts[n - 1]) if 1 <= n <= len(parts) else []
    return 1 <= m <= len(found) and found[m - 1].lower() == keyword.strip().lower()


def start_end(text: str) -> bool:
    """The first word is also the last one."""
    found = words(text)
    return len(found) > 1 and found[0].lower() == found[-1].lower()


def repeat_phrase(text: str, phrase: str, small_n: int) -> bool:
    """A phrase `small_n` times, each time with one word in its middle replaced."""
    wanted = [each.lower() for each in words(phrase)]
    found = [each.lower() for each in words(text)]
    near = 0
    for start in range(len(found) - len(wanted) + 1):
        window = found[start : start + len(wanted)]
        if window[:1] == wanted[:1] and window[-1:] == wanted[-1:]:
            near += sum(one != other for one, other in zip(window, wanted, strict=True)) == 1
    return near == small_n


def no_adjacent_consecutive(text: str) -> bool:
    """No word begins with the letter that follows the first letter of the word before it."""
    first = [each[0].lower() for each in words(text)]
    return not any(ord(after) - ord(before) == 1 for before, after in pairwise(first))


def square_brackets(text: str) -> bool:
    """Every word stands in square brackets."""
    return bool(text.split()) and all(re.fullmatch(r"\[[^\[\]]+\][.,;:!?]*", each) for each in text.split())


def sentence_hyphens(text: str) -> bool:
    """Sentences are joined by hyphens, with no space between."""
    parts = sentences(text.replace("-", " "))
    joints = [each for each in re.finditer(r"[.!?](?=\S)-?(\s*)", text) if "-" in each[0]]
    return len(parts) > 1 and len(joints) == len(parts) - 1 and not re.search(r"\s-|-\s|[.!?]\s+\S", text)


def copy_text(text: str, prompt_to_repeat: str) -> bool:
    return text.strip() == prompt_to_repeat.strip()


def copy_span_idx(text: str, n_start: int, n_end: int, prompt_to_repeat: str) -> bool:
    """The characters of the prompt from one index to another."""
    return text.strip().lower() == prompt_to_repeat[n_start:n_end].strip().lower()


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
    "copy:copying_simple": copying_simple,
    "copy:copying_multiple": copying_multiple,
    "copy:repeat_phrase": repeat_phrase,
    "copy:copy": copy_text,
    "copy:copy_span_idx": copy_span_idx,
    "punctuation:punctuation_dot": punctuation_dot,
    "punctuation:punctuation_exclamation": punctuation_exclamation,
    "count:lowercase_counting": lowercase_counting,
    "count:counting_composition": counting_composition,
    "count:count_unique": count_unique,
    "count:count_increment_word": count_increment_word,
    "letters:letter_counting": letter_counting,
    "letters:letter_counting2": letter_counting_one,
}
"""All 54 instructions, by id."""
RLVR: dict[str, tuple[str, dict[str, str]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
    "verify_keyword_frequency": ("keywords:frequency", {"word": "keyword", "N": "frequency"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"N": "let_frequency"}),
    "validate_response_language": ("language:response_language", {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}),
    "validate_word_constraint": ("length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"N": "num_sentences", "quantifier": "relation"},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph"},
    ),
    "verify_postscript": ("detectable_content:postscript", {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_choice": ("detectable_format:constrained_response", {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"N": "num_sections", "section_splitter": "section_spliter"},
    ),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"N": "capital_frequency", "quantifier": "capital_relation"},
    ),
    "validate_end": ("startend:end_checker", {}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
"""RLVR-IFEval's names: the id of the same instruction, and its arguments' names here."""
EXACT = {"verify_keyword_frequency": "relation", "verify_letter_frequency": "let_relation"}
"""Argument to set to "exactly": RLVR's counts without a quantifier are exact."""


def ifeval(
    completion_text: str,
    ground_truth: Any = None,
    instruction_id_list: Sequence[str] | None = None,
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
    instruction_id_list: Sequence[str] | None = None,
    kwargs: Any = None,
    answer: Any = None,
) -> float:
    """Share of the instructions that are followed. They are given as for `ifeval`."""
    results = _results(completion_text, answer if ground_truth is None else ground_truth, instruction_id_list, kwargs)
    return sum(results) / len(results) if results else 0.0


def follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a text follows an instruction, given by its id or RLVR's name."""
    given = {key: value for key, value in arguments.items() if value is not None}
    if name in RLVR:
        name_here, renamed = RLVR[name]
        given = {renamed.get(key, key): value for key, value in given.items()}
        if name in EXACT:
            given.setdefault(EXACT[name], "exactly")
    else:
        name_here = name
    check = CONSTRAINTS.get(name_here)
    if check is None or not text.strip():
        return False
    taken = inspect.signature(check).parameters
    try:
        return bool(check(text, **{key: value for key, value in given.items() if key in taken}))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        return False


def _results(completion: str, ground_truth: Any, ids: Sequence[str] | None, kwargs: Any) -> list[bool]:
    text = without_thinking(completion)
    return [follows(text, name, arguments) for name, arguments in _instructions(ground_truth, ids, kwargs)]


def _instructions(ground_truth: Any, ids: Sequence[str] | None, kwargs: Any) -> list[tuple[str, Mapping[str, Any]]]:
    if ids is None:
        truth = _data(ground_truth)
        if isinstance(truth, list):
            return [each for part in truth for each in _instructions(part, None, None)]
        if not isinstance(truth, Mapping):
            return []
        if "func_name" in truth:
            return [(str(truth["func_name"]), {key: value for key, value in truth.items() if key != "func_name"})]
        found = truth.get("instruction_id") or truth.get("instruction_id_list") or []
        ids, kwargs = [found] if isinstance(found, str) else found, truth.get("kwargs")
    given = _data(kwargs)
    given = [given] if isinstance(given, Mapping) else list(given or [])
    given += [None] * (len(ids) - len(given))
    return [(str(name), arguments or {}) for name, arguments in zip(ids, given, strict=False)]


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


# Language identification by script and most frequent words: enough for IFEval's thirty languages.

COMMON_WORDS = {
    "en": "the of and to in is that it for was with as on are this be at by not have you or from his an they which",
    "es": "de la que el en y los se del las un por con una su para es al lo como más pero sus le ya o este sí porque",
    "pt": "de que o e do da em um para é com não uma os no se na por mais as dos como mas foi ao ele das tem à seu",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont avec ont cette",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat",
    "it": "di che e la il un a per è in una sono mi non si le lo da con ho ma i come più del della gli nel anche questo",
    "pl": "w i z na się do nie jest to że o jak po od za przez co dla tym są był przy czy jego oraz tego może być",
    "vi": "và của là có không một được trong cho các với những này người đã để khi từ tôi về nhiều ra cũng như",
    "sw": "ya na wa kwa ni katika za la cha kuwa hii watu kama hivyo lakini yake au kila hiyo pia sana wao vya moja",
    "fi": "ja on ei se että oli hän en ovat mutta myös kun niin tai joka mitä olen kuin sen ole voi tämä hänen minä",
    "nl": "de het een van en in is dat op te zijn met voor niet aan er om ook als die bij door maar naar wordt",
    "sv": "och i att det som en på är av för med den till inte om ett han men var jag sig från vi så kan",
    "tr": "ve bir bu için de da ile çok daha olarak gibi en ne ama sonra kadar olan var ki her o",
    "ru": "и в не на что он с как это по но из у за от так же для вы бы то все она мы был его",
    "bg": "и на да се в за не е от че са с по като но той тя това ще който беше си или до съм",
    "uk": "і в не на що з як це до та у за від що для але він його є також які бути або про ми",
    "hi": "के में है की और से का को पर यह कि एक हैं नहीं भी लिए कर था तो इस वह ने हो",
    "mr": "आणि आहे आहेत हे मध्ये नाही व या तो ते एक करून त्या साठी होते पण च्या की",
    "ne": "छ र को मा हो पनि गर्न छन् एक लागि यो गरेको तथा भएको थियो हुन्छ हरू",
    "ar": "في من على إلى أن هذا التي عن مع كان هذه الذي لا ما هو و كل بعد كما قد",
    "fa": "در به از که این را با است برای آن یک می های بر تا شده کرد هم خود اما نیز",
    "ur": "کے میں کی ہے اور سے کا کو پر یہ کہ ہیں نے ایک نہیں بھی لیے تھا وہ گیا اس",
}
SCRIPTS = {
    "DEVANAGARI": ("hi", "mr", "ne"), "ARABIC": ("ar", "fa", "ur"), "CYRILLIC": ("ru", "bg", "uk"),
    "LATIN": ("en", "es", "pt", "fr", "de", "it", "pl", "vi", "sw", "fi", "nl", "sv", "tr"),
    "BENGALI": ("bn",), "THAI": ("th",), "TAMIL": ("ta",), "TELUGU": ("te",), "HANGUL": ("ko",), "HEBREW": ("he",),
    "GREEK": ("el",), "KANNADA": ("kn",), "GUJARATI": ("gu",), "GURMUKHI": ("pa",), "MALAYALAM": ("ml",),
    "HIRAGANA": ("ja",), "KATAKANA": ("ja",), "CJK": ("zh",),
}  # fmt: skip
"""Languages of a script. Kana decide for Japanese against Chinese."""
KANA_SHARE = 0.1
OWN_LETTERS = {
    "uk": "іїєґ",
    "ur": "ےٹڈڑںھہ",
    "fa": "پچژگک",
    "mr": "ळ",
    "pl": "ąęłśżź",
    "vi": "ạảấầẩậắằặẹẻếềểệỉịọỏốồổộớờởợụủứừửựỳỵđơư",
}
"""Letters that no other language of the same script has."""
_SAMPLE_CHARS = 20_000


def is_in(text: str, language: str) -> bool:
    """Whether a text is in a language (`en`, `pt-BR`). One without letters may be in any."""
    found = detected(text)
    return found is None or found == language.lower().partition("-")[0].partition("_")[0]


def detected(text: str) -> str | None:
    """The code of the language, or None for a text without letters."""
    text = text[:_SAMPLE_CHARS]
    # The first word of a letter's Unicode name is its script: LATIN SMALL LETTER A.
    scripts = Counter(unicodedata.name(each, "UNKNOWN").split(" ")[0] for each in text if each.isalpha())
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > KANA_SHARE * scripts["CJK"]:
        scripts["HIRAGANA"] += scripts.pop("CJK", 0)
    languages = SCRIPTS.get(scripts.most_common(1)[0][0], ())
    if len(languages) < 2:
        return languages[0] if languages else "und"
    used = Counter(re.findall(r"[^\W\d_]+(?:[\u0900-\u097f]+)*", text.lower()))
    letters = Counter(text.lower())
    return max(languages, key=lambda code: _score(code, used, letters))


def _score(code: str, used: Counter[str], letters: Counter[str]) -> float:
    common = sum(used[word] for word in set(COMMON_WORDS[code].split()))
    return common + 0.5 * sum(letters[each] for each in OWN_LETTERS.get(code, ""))
