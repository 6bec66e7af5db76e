"""A verifiers environment: write a short text backwards, character by character.

`load_environment()` needs no network: its texts are one or two medical terms. With `dataset_name` the texts come from a
Hugging Face dataset instead, and with `answer_tag` the answer is read from `<tag>…</tag>`, which suits larger models.
A hash of each text decides whether it is for training or for evaluation, so no text is for both.
The reward is the similarity of answer and reversed text, 0 to 1 (`difflib.SequenceMatcher.ratio`).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import islice

import verifiers as vf
from datasets import Dataset, load_dataset

TERMS = tuple(
    """
    abdomen acid acute airway allergy aorta artery arthritis aspirin asthma atrium axon biopsy bladder bleed blister
    bone brain breath bronchus bruise burn cardiac cartilage cell chronic clinic clot colon cornea cortex cough cramp
    dermis diabetes diet digest dose edema embryo enzyme epidural fascia fatigue femur fever fibula fracture gastric
    gland glucose graft heart hepatic hernia hormone immune infarct insulin joint kidney knee larynx lesion ligament
    liver lung lymph marrow membrane muscle nausea nerve neuron nodule optic organ ovary oxygen pain palate pancreas
    pelvis plasma platelet pleura polyp pulse pupil rash reflex renal retina rib saliva scalp scan sepsis serum shock
    sinus skin skull spasm spine spleen sprain stent stomach stroke suture tendon thorax throat thyroid tibia tissue
    tongue tonsil toxin trachea trauma tremor tumor ulcer uterus vaccine valve vein venous vertebra viral wound wrist
    """.split()
)
EVAL_SEED_OFFSET = 1_000_000
HELD_OUT = 10
"""One of this many texts is held out for evaluation."""


def sample_texts(num_texts: int, max_terms: int, seed: int) -> list[str]:
    """`num_texts` texts of 1 to `max_terms` different medical terms, the same for the same seed."""
    return list(islice(_texts(max_terms, seed), num_texts))


def is_held_out(text: str) -> bool:
    """Whether a text is only for evaluation."""
    return zlib.crc32(text.encode()) % HELD_OUT == 0


def _texts(max_terms: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield " ".join(rng.sample(TERMS, rng.randint(1, max_terms)))


def similarity(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    """How close the answer comes to the reversed text: 1.0 is exact."""
    return SequenceMatcher(None, parser.parse_answer(completion) or "", answer).ratio()


def exact(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    """1.0 when every character is right. Counted, not rewarded."""
    return float(parser.parse_answer(completion) == answer)


def load_environment(
    num_examples: int = 1000,
    max_terms: int = 2,
    seed: int = 0,
    dataset_name: str | None = None,
    dataset_split: str = "train",
    answer_tag: str | None = None,
    system_prompt: str | None = None,
) -> vf.Environment:
    """Build the environment.

    `num_examples`, `max_terms` and `seed` shape the built-in texts. With `dataset_name` all texts of the dataset are
    used, whose column `prompt` holds the texts. There are a tenth as many evaluation texts as `num_examples`. The
    system prompt that goes with `answer_tag` can be replaced by `system_prompt`.
    """
    if dataset_name is None:
        texts = list(islice((text for text in _texts(max_terms, seed) if not is_held_out(text)), num_examples))
        held_out = filter(is_held_out, _texts(max_terms, seed + EVAL_SEED_OFFSET))
    else:
        found = load_dataset(dataset_name, split=dataset_split)["prompt"]
        texts, held_out = [text for text in found if not is_held_out(text)], filter(is_held_out, found)
    eval_texts = list(islice(held_out, max(num_examples // 10, 1)))
    parser = vf.XMLParser([answer_tag], answer_field=answer_tag) if answer_tag else vf.Parser()
    if answer_tag and system_prompt is None:
        system_prompt = f"Reverse the text character-by-character. Put your answer in <{answer_tag}> tags."
    return vf.SingleTurnEnv(
        dataset=_as_dataset(texts),
        eval_dataset=_as_dataset(eval_texts),
        system_prompt=system_prompt,
        parser=parser,
        rubric=vf.Rubric(funcs=[similarity, exact], weights=[1.0, 0.0], parser=parser),
    )


def _as_dataset(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"question": texts, "answer": [text[::-1] for text in texts]})
