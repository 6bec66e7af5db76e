"""Each of the 54 instructions, and of RLVR's 25 functions, is followed by one text and not by another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prime_rl.environments.rewards.ifeval import CONSTRAINTS, RLVR, detected, follows, if_multi, ifeval, rule_sentences

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["Dose", "pain"]}, "a dose for pain", "a dose"),
    ("keywords:frequency", {"keyword": "pain", "frequency": 2, "relation": "at least"}, "painful, Pain!", "pain"),
    ("keywords:forbidden_words", {"forbidden_words": ["ban"]}, "banana", "a ban"),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "less than"}, "Zoo", "zZ"),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist nicht gut für die Patienten",
        "This is not good for you",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", "Dr. Who, 3.5."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\n\n***\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "well go", "don't go"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        'First.\n\n"Then, …',
        "First.\nThen",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye P. P. S more", "Bye PPS more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- **two**\n**no**", "* one\n- two\n---"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2}, "Part 1\nPart 2", "Part 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Pain>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "yes\n******\nno", "yes\n******\nyes"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "That is all."}, "x. That is all. ", "That is all. x"),
    ("startend:quotation", {}, ' "all" ', '"all" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "at most"},
        "HIV is",
        "HIV AIDS",
    ),
    ("change_case:english_capital", {}, "THIS IS ALL", "THIS IS all"),
    ("change_case:english_lowercase", {}, "this is all", "This is all"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("keywords:word_once", {"keyword": "pain"}, "pain", "pain pain"),
    ("keywords:word_count_different_numbers", {"keyword": "a", "frequency": 2, "relation": "at most"}, "a a", "a a a"),
    ("keywords:exclude_word_harder", {"keyword": "pain"}, "pain, painful", "the pain is"),
    ("keywords:palindrome", {}, "at noon", "at night"),
    ("keywords:keyword_specific_position", {"keyword": "pain", "n": 2, "m": 1}, "Yes. pain is.", "Yes. Pain is."),
    ("keywords:start_end", {}, "Pain is pain", "Pain is pain."),
    ("keywords:no_adjacent_consecutive", {}, "a cat", "a bat"),
    ("paragraphs:paragraphs", {}, "a\n***\nb", "a\n\nb"),
    ("paragraphs:paragraphs2", {}, "a\n\nb", "a\nb"),
    ("first_word:first_word_sent", {"first_word": "we"}, "We go. We stay.", "We go. They stay."),
    ("first_word:first_word_answer", {"first_word": "we"}, "We go. They stay.", "They go."),
    ("last_word:last_word_sent", {"last_word": "go"}, "We go. They go!", "We go. They stay."),
    ("last_word:last_word_answer", {"last_word": "go"}, "They stay. We go.", "We go. They stay."),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", "<<I am>> at home"),
    ("detectable_format:square_brackets", {}, "[I] [am]", "[I] [am]."),
    ("detectable_format:sentence_hyphens", {}, "One is.-Two is.-Three is.", "One is. Two is. Three is."),
    ("copy:copying_simple", {"prompt_to_repeat": "Say it."}, "Say it.", "Say it. It."),
    ("copy:copying_multiple", {"prompt_to_repeat": "a", "N": 3}, "a\n******\na\n******\na", "a\n******\na"),
    ("copy:repeat_phrase", {"phrase": "a big red dog", "small_n": 2}, "a big old dog, a bad red dog", "a big red dog"),
    ("copy:copy", {"prompt_to_repeat": "Say it."}, "say it.", "say it"),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "bc", "abc"),
    ("punctuation:punctuation_dot", {}, "a!", "a."),
    ("punctuation:punctuation_exclamation", {}, "a.", "a!"),
    ("count:lowercase_counting", {"N": 1}, "A B c", "A b c"),
    (
        "count:counting_composition",
        {"n_sent": 1, "n_words": 3},
        "I am.\n***\nYou are.\n***\nWe are.",
        "I am.\n***\nYou are.\n***\nWe are here.",
    ),
    ("count:count_unique", {}, "no word twice", "no word no"),
    ("count:count_increment_word", {"keyword1": "a", "keyword2": "b"}, "a b b", "a b"),
    ("letters:letter_counting", {"N": 3, "relation": "at least"}, "a bc!", "a b"),
    ("letters:letter_counting2", {"letter": "x", "let_frequency": 2, "let_relation": "at least"}, "xX", "x"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_an_instruction_is_followed_or_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert follows(good, name, {**arguments, "unused": None})
    assert not follows(bad, name, arguments)
    assert not follows("", name, arguments)


OF_RLVR: list[tuple[str, dict[str, Any], str, str]] = [
    ("verify_keywords", {"keyword_list": ["Dose", "pain"]}, "a dose for painful", "a dose"),
    ("verify_keyword_frequency", {"word": "Pain", "N": 1}, "pain, painful", "pain pain"),
    ("validate_forbidden_words", {"forbidden_words": ["ban"]}, "a bun", "banana"),
    ("verify_letter_frequency", {"letter": "z", "N": 1}, "Zz", "zz"),
    ("validate_response_language", {"language": "en"}, "This is not good for you", "Das ist nicht gut für dich"),
    ("verify_paragraph_count", {"N": 2}, "a\n* * *\nb", "a\n***\nb"),
    ("validate_word_constraint", {"N": 1, "quantifier": "at most"}, "state-of-the-art", "the art"),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, "One. Two.", "One."),
    ("validate_paragraphs", {"N": 2, "i": 2, "first_word": "Then"}, "a\n\nThen, b", "a\n\nthen b"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Bye. **P.S.** more", "Bye. P.S."),
    ("validate_placeholders", {"N": 2}, "[a] [b]", "[a]"),
    ("verify_bullet_points", {"N": 2}, "- **a**\n**b**", "- a"),
    ("validate_title", {}, "<<a>>", "<a>"),
    ("validate_choice", {"options": ["yes", "no"]}, "I say yes", "Yes"),
    ("validate_highlighted_sections", {"N": 2}, "*a* *b*", "*a*"),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1 a Part 2 b", "Part 1 a"),
    ("validate_json_format", {}, "[1]", "```json\n[1]\n```"),
    ("validate_repeat_prompt", {"original_prompt": "Say it."}, "Say it. It.", "say it. It."),
    ("validate_two_responses", {}, "a******b", "a******a"),
    ("validate_uppercase", {}, "A 1", "A b"),
    ("validate_lowercase", {}, "a 1", "a B"),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"}, "HIV A", "HIV aids"),
    ("validate_end", {"end_phrase": "That is all."}, "x. That is all.", "x. that is all."),
    ("validate_quotation", {}, '"a"', '"a'),
    ("validate_no_commas", {}, "a", "a, b"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), OF_RLVR, ids=[case[0] for case in OF_RLVR])
def test_a_function_of_rlvr_holds_or_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert follows(good, name, {**arguments, "unused": None})
    assert not follows(bad, name, arguments)
    assert not follows("", name, arguments)


def test_the_table_has_all_instructions() -> None:
    assert {name for name, *_ in CASES} == set(CONSTRAINTS)
    assert len(CONSTRAINTS) == 54
    assert {name for name, *_ in OF_RLVR} == set(RLVR)
    assert follows("bc", "copy:copy_span_idx", {"prompt_to_repeat": "abcd", "n_start": 1, "n_end": 3.0})


def test_ground_truths_of_rlvr_and_of_several_instructions() -> None:
    truth = {"func_name": "verify_keyword_frequency", "word": "pain", "N": 2, "quantifier": None, "letter": None}
    assert ifeval("pain and pain", ground_truth=json.dumps(truth)) == 1
    assert ifeval("<think>pain</think>pain pain pain", answer=json.dumps(truth)) == 0
    assert ifeval("NO", ground_truth=json.dumps({"func_name": "validate_lowercase"})) == 0
    assert ifeval("x", ground_truth=json.dumps({"func_name": "no_such_function"})) == 0
    assert ifeval("x", ground_truth="not JSON") == ifeval("x") == 0
    several = "[{'instruction_id': ['punctuation:no_comma', 'keywords:word_once'], 'kwargs': [None, {'keyword': 'a'}]}]"
    assert if_multi("a, b", ground_truth=several) == 0.5
    assert ifeval("a, b", ground_truth=several) == 0
    assert ifeval("a b", instruction_id_list=["punctuation:no_comma"], kwargs=[{}]) == 1
    in_cells = {"instruction_id_list": '["punctuation:no_comma"]', "kwargs": "[{}]"}  # as a CSV file holds them
    assert (ifeval("a b", **in_cells), ifeval("a, b", **in_cells)) == (1, 0)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("en", "The patient was given a dose of the drug, and the pain went away."),
        ("es", "El paciente recibió una dosis del medicamento y el dolor desapareció."),
        ("pt", "O paciente recebeu uma dose do medicamento e a dor não voltou."),
        ("fr", "Le patient a reçu une dose du médicament et la douleur est partie."),
        ("de", "Der Patient hat eine Dosis des Medikaments bekommen und ist nicht mehr krank."),
        ("it", "Il paziente ha ricevuto una dose del farmaco e il dolore non è tornato."),
        ("fi", "Potilas sai annoksen lääkettä ja kipu on poissa, mutta hän ei ole terve."),
        ("vi", "Bệnh nhân đã được cho một liều thuốc và cơn đau không còn."),
        ("sw", "Mgonjwa alipewa dawa na maumivu ya kichwa hayakuwa makali kama hapo awali."),
        ("pl", "Pacjent otrzymał dawkę leku i nie ma już bólu."),
        ("ru", "Пациент получил дозу лекарства, и боль прошла, но он ещё не здоров."),
        ("uk", "Пацієнт отримав дозу ліків, і біль минув, але він ще не здоровий."),
        ("bg", "Пациентът получи доза от лекарството и болката не се върна."),
        ("hi", "मरीज को दवा की एक खुराक दी गई और दर्द चला गया है।"),
        ("mr", "रुग्णाला औषधाचा एक डोस दिला आणि वेदना कमी झाली आहे."),
        ("ar", "أخذ المريض جرعة من الدواء في الصباح ولا يشعر الآن بالألم"),
        ("fa", "بیمار یک دوز از دارو را گرفت و درد او کمتر شده است"),
        ("ur", "مریض کو دوا کی ایک خوراک دی گئی اور درد کم ہو گیا ہے"),
        ("ja", "患者は薬を一回分飲み、痛みは消えました。"),
        ("zh-cn", "病人服用了一剂药，疼痛消失了。"),
        ("ko", "환자는 약을 먹었고 통증이 사라졌습니다."),
        ("th", "ผู้ป่วยได้รับยาและอาการปวดหายไป"),
        ("ta", "நோயாளிக்கு மருந்து கொடுக்கப்பட்டது"),
    ],
)
def test_languages_are_told_apart(code: str, text: str) -> None:
    assert detected(text) == code


def test_sentences_do_not_end_at_abbreviations() -> None:
    assert rule_sentences("Dr. Who took 3.5 mg, i.e. little. It helped! Did it?") == [
        "Dr. Who took 3.5 mg, i.e. little.",
        "It helped!",
        "Did it?",
    ]
