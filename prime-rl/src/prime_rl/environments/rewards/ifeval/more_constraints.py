"""The other 29 instructions of the IF multi-constraints data (Pyatkin et al., 2025), by id."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from prime_rl.environments.rewards.ifeval.constraints import DIVIDER, RESPONSE_DIVIDER, Check
from prime_rl.environments.rewards.ifeval.counting import holds, occurrences, paragraphs, sentences, words


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


MORE: dict[str, Check] = {
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
