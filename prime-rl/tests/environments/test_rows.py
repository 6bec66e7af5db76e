"""The reader of `rows`: formats, ids, filters, order, mixture."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from datasets import Image as ImageColumn
from PIL import Image

from prime_rl.environments.rewards.registry import RewardSpec, resolve
from prime_rl.environments.rows.arguments import read_rows_config
from prime_rl.environments.rows.curricula import PassRate, read_pass_rates, write_order, write_pass_rates
from prime_rl.environments.rows.formats import FORMATS, boxed, find_format
from prime_rl.environments.rows.loading import Problem, load_problems, mixed
from prime_rl.environments.rows.single_turn import load_environment
from prime_rl.environments.rows.sources import RowsFault
from prime_rl.utils.conversations import has_image
from prime_rl.utils.images import ImageLimits, image_parts, requested_bytes
from prime_rl.utils.pydantic_config import ConfigError

Write = Callable[[str, Sequence[Mapping[str, Any]]], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
        file = tmp_path / name
        if file.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(file)

    return write_rows


def load(*datasets: Mapping[str, Any], **args: Any) -> list[Problem]:
    return load_problems(read_rows_config({"datasets": list(datasets), **args}))


def questions(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"Question {n}?", "answer": str(n), **more} for n in range(count)]


ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": ({"question": "How many?", "answer": "6 * 200 = 1,200\n#### 1,200"}, "How many?", "1200"),
    "math": (
        {"problem": "Solve.", "level": "Level 3", "type": "Algebra", "solution": r"So $\boxed{\frac{1}{2}}$."},
        "Solve.",
        r"\frac{1}{2}",
    ),
    "deepscaler": ({"problem": "Sum?", "answer": "7", "solution": "..."}, "Sum?", "7"),
    "aime": ({"Problem": "Find n.", "Answer": 204, "ID": "2024-I-1"}, "Find n.", "204"),
    "beyondaime": ({"problem": "Find m.", "answer": 5}, "Find m.", "5"),
    "geometry3k": ({"problem": "<image>Find x.", "answer": "12"}, "Find x.", "12"),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "  return 1\n", "test": "check",
         "entry_point": "f"},
        "def f():",
        "  return 1\n",
    ),
    "mbpp": (
        {"task_id": 11, "text": "Remove a letter.", "code": "def r(): pass", "test_list": ["assert r() == 1"],
         "test_setup_code": "", "challenge_test_list": []},
        "assert r() == 1",
        "def r(): pass",
    ),
    "apps": (
        {"problem_id": 7, "question": "Read n.", "input_output": '{"inputs": ["1"], "outputs": ["2"]}',
         "difficulty": "interview", "starter_code": "class S:"},
        "class S:",
        "",
    ),
    "ifeval": (
        {"messages": [{"role": "user", "content": "Write it without commas."}],
         "ground_truth": '{"func_name": "validate_no_commas"}', "dataset": "ifeval", "constraint": "no commas"},
        "without commas",
        "",
    ),
    "if_multi_constraints": (
        {"messages": [{"role": "user", "content": "Two rules."}], "ground_truth": "[{'instruction_id': ['a:b']}]"},
        "Two rules.",
        "",
    ),
    "allenai_rlvr": (
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "ground_truth": "42",
         "dataset": "gsm8k"},
        "Q",
        "42",
    ),
    "clevr_count_70k": ({"problem": "How many cubes?", "answer": "3"}, "How many cubes?", "3"),
    "torl_data": (
        {"prompt": [{"role": "user", "content": "Integrate."}], "reward_model": {"ground_truth": "pi"}},
        "Integrate.",
        r"\boxed{pi}",
    ),
    "jsonl": ({"prompt": "Name it.", "answer": "aorta"}, "Name it.", "aorta"),
}  # fmt: skip
"""A row of each format with the columns of its source, a part of its prompt, and its answer."""


@pytest.mark.parametrize("kind", [each.name for each in FORMATS if not each.makes_rows])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_every_format_reads_a_row_with_the_columns_of_its_source(kind: str, suffix: str, write: Write) -> None:
    row, asks, answer = ROWS[kind]
    (problem,) = load({"path": write(f"rows{suffix}", [row]), "type": kind})
    assert asks in problem.text
    assert problem.answer == answer
    assert problem.prompt[-1]["role"] == "user"


def test_what_rewards_need_besides_the_answer_is_decoded(write: Write) -> None:
    def of(kind: str) -> Problem:
        (problem,) = load({"path": write("rows.jsonl", [ROWS[kind][0]]), "type": kind})
        return problem

    assert of("apps").extra["input_output"] == {"inputs": ["1"], "outputs": ["2"]}
    assert of("ifeval").extra["ground_truth"] == {"func_name": "validate_no_commas"}
    assert of("if_multi_constraints").extra["ground_truth"] == [{"instruction_id": ["a:b"]}]
    assert of("humaneval").id == "HumanEval/0"
    assert of("mbpp").id == "mbpp_11"
    assert [reward.fn for reward in of("allenai_rlvr").rewards] == ["allenai_gsm8k"]


def test_the_reward_of_every_format_is_registered() -> None:
    for each in FORMATS:
        assert resolve(RewardSpec(fn=each.reward))


@pytest.mark.parametrize(
    ("path", "kind", "name"),
    [
        ("openai/gsm8k", "rl", "gsm8k"),
        ("BUAADreamer/clevr_count_70k", "rl", "clevr_count_70k"),
        ("hiyouga/geometry3k", "rl", "geometry3k"),
        ("data/torl_data", "rl", "torl_data"),
        ("EleutherAI/hendrycks_math", None, "math"),
        ("allenai/RLVR-GSM-MATH-IF-Mixed-Constraints", None, "allenai_rlvr"),
        ("allenai/IF_multi_constraints_upto5", None, "if_multi_constraints"),
        ("allenai/RLVR-IFeval", None, "ifeval"),
        ("aftermath.jsonl", None, "jsonl"),
        ("aftermath.jsonl", "deepscaler", "deepscaler"),
    ],
)
def test_a_type_or_a_part_of_the_path_chooses_the_format(path: str, kind: str | None, name: str) -> None:
    assert find_format(kind, path).name == name


@pytest.mark.parametrize(
    ("text", "inside"),
    [(r"\boxed{1} or \boxed{\frac{a}{b}} end", r"\frac{a}{b}"), (r"\boxed{{}", None), ("none", None)],
)
def test_the_last_box_is_read_with_its_braces(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


def test_images_of_a_row_are_parts_of_its_prompt_with_absolute_paths(write: Write, tmp_path: Path) -> None:
    (tmp_path / "source.json").write_text("[]")  # of the user, as it is no copy from S3
    for held, is_image in (
        ({"images": ["a.PNG"]}, True),
        ({"image": {"path": "a.dcm"}}, True),
        ({"image": "data:image/png;base64,aQ=="}, True),
        ({"images": []}, False),
        ({"image": "registry.example/task:1"}, False),  # of a container
    ):
        (problem,) = load({"path": write("rows.jsonl", questions(1, **held))})
        assert has_image(problem.prompt) == is_image, held
        for part in image_parts(problem.prompt):
            assert Path(part.source).is_absolute() or part.source == held["image"]
    (problem,) = load({"path": write("rows.parquet", questions(1, image=b"i"))})
    assert [part.source for part in image_parts(problem.prompt)] == ["data:image/jpeg;base64,aQ=="]
    # A hub dataset holds images of any kind, as files: nobody decodes them before the limits are known.
    file = io.BytesIO()
    Image.new("CMYK", (4, 4)).save(file, "JPEG")
    table = Dataset.from_list(questions(1, image={"bytes": file.getvalue(), "path": None}))
    table.cast_column("image", ImageColumn()).save_to_disk(tmp_path / "saved")
    (problem,) = load({"path": str(tmp_path / "saved")})
    (shown,) = image_parts(problem.prompt)
    assert requested_bytes(shown.source, None, ImageLimits()) == file.getvalue()
    same = [{"question": "A fracture?", "answer": "yes", "image": f"{n}.png"} for n in (1, 2, 2)]
    first, second = load({"path": write("rows.jsonl", same)})
    assert first.id != second.id, "of the same text"
    marked: dict[str, Any] = {"question": "<image> or <image>?", "answer": "1"}
    (problem,) = load({"path": write("rows.jsonl", [{**marked, "images": ["a.png", "b.png"]}])})
    assert [Path(part.source).name for part in image_parts(problem.prompt)] == ["a.png", "b.png"]
    assert [part.get("text") for part in problem.prompt[-1]["content"]] == [None, " or ", None, "?"]
    with pytest.raises(RowsFault, match="has 1 image, and its prompt says <image> 2 times"):
        load({"path": write("rows.jsonl", [{**marked, "images": ["a.png"]}])})


def test_rows_with_and_without_images_and_a_system_message_are_one_dataset(write: Write) -> None:
    path = write("rows.jsonl", [*questions(1, image="data:image/png;base64,aQ=="), *questions(2)[1:]])
    table = load_environment(datasets=[{"path": path}], system_prompt="Be brief.").get_dataset()
    prompts = sorted(table["prompt"], key=lambda prompt: not has_image(prompt))
    assert [has_image(prompt) for prompt in prompts] == [True, False]
    texts = [[part["text"] for message in prompt for part in message["content"]] for prompt in prompts]
    assert texts == [["Be brief.", None, "Question 0?"], ["Be brief.", "Question 1?"]]


def test_ids_survive_filters_mixing_templates_and_other_rows_before(write: Write) -> None:
    rows = [{**row, "level": index % 3} for index, row in enumerate(questions(30))]
    path = write("rows.jsonl", rows)
    everything = {problem.text: problem.id for problem in load({"path": path})}
    assert len(set(everything.values())) == 30
    filtered = load({"path": path, "level": [1]})
    moved = load({"path": write("moved.jsonl", rows[20:])})
    other = load({"path": path}, {"path": write("b.jsonl", [{"question": "B?", "answer": "b"}]), "weight": 5.0})
    for problem in (*filtered, *moved, *(each for each in other if each.dataset == "rows")):
        assert everything[problem.text] == problem.id
    templated = load({"path": path, "template": "{question} Level {level}."}, system_prompt="Be short.")
    assert {problem.id for problem in templated} == set(everything.values())
    numbered = load({"path": path, "id": "row", "level": [1]})
    assert sorted(int(problem.id) for problem in numbered) == list(range(1, 30, 3))


def test_a_row_that_repeats_another_counts_once_and_ids_of_two_prompts_differ(write: Write) -> None:
    path = write("rows.jsonl", [*questions(3), *questions(3)])
    assert len(load({"path": path})) == 3
    clash = write("clash.jsonl", [{"id": 1, "question": q, "answer": "a"} for q in "xy"])
    with pytest.raises(RowsFault, match=r"two different prompts have the id '1': set id = \"content\""):
        load({"path": clash})
    assert len(load({"path": clash, "id": "content"})) == 2
    with pytest.raises(RowsFault, match="a and b both have the prompt id"):
        load({"path": path, "name": "a"}, {"path": path, "name": "b"})


def test_filters_by_level_columns_and_length(write: Write) -> None:
    rows = [
        {"problem": "p" * length, "answer": "1", "level": f"Level {level}", "subject": subject}
        for length, level, subject in [(10, 1, "counting & probability"), (20, 5, "algebra"), (30, 5, "geometry")]
    ]
    path = write("rows.jsonl", rows)

    def kept(**dataset: Any) -> list[int]:
        return sorted(problem.text.count("p") for problem in load({"path": path, **dataset}))

    assert kept(level=[5]) == [20, 30]
    assert kept(where={"subject": ["counting_probability", "geometry"]}) == [10, 30]
    assert kept(min_chars=15, max_chars=25) == [20]
    assert kept(level=[5], max_chars=25) == [20]
    with pytest.raises(RowsFault, match=r"no rows are left: rows: 0 of 3 rows; left out: 3 by level in 4"):
        kept(level=[4])
    with pytest.raises(RowsFault, match="a row has no column 'colour' to filter by; it has problem, answer, level"):
        kept(where={"colour": ["red"]})


def test_tokens_are_counted_by_the_tokenizer_of_a_model(write: Write) -> None:
    path = write("rows.jsonl", [{"question": "abc " * count, "answer": "1"} for count in (1, 40)])
    model = Path(__file__).resolve().parents[3] / "examples" / "reverse_text" / "model"
    assert len(load({"path": path, "max_tokens": 20}, tokenizer=str(model))) == 1


def test_a_curriculum_is_followed_and_unknown_ids_are_counted(write: Write, tmp_path: Path) -> None:
    path = write("rows.jsonl", [{"id": f"algebra & co_{n}", **row} for n, row in enumerate(questions(5))])
    order = tmp_path / "order.txt"
    order.write_text("algebra & co_3\n\n  algebra_co_1 \nnobody\nalgebra & co_3\n", encoding="utf-8")
    assert [problem.answer for problem in load({"path": path, "order": str(order)})] == ["3", "1"]
    assert [problem.answer for problem in load({"path": path, "order": str(order), "count": 1})] == ["3"]
    order.write_text("nobody\n", encoding="utf-8")
    with pytest.raises(RowsFault, match="none of its 1 ids is in the dataset: the file has nobody"):
        load({"path": path, "order": str(order)})


def test_a_band_of_pass_rates_keeps_the_prompts_within(write: Write, tmp_path: Path) -> None:
    path = write("rows.jsonl", [{"id": f"q{n}", **row} for n, row in enumerate(questions(5))])
    for name in ("rates.jsonl", "rates.csv"):
        table = tmp_path / name
        write_pass_rates([PassRate(f"q{n}", 4, n, pass_at={1: n / 4}) for n in range(4)], table)
        assert [rate.rate for rate in read_pass_rates(table).values()] == [0, 0.25, 0.5, 0.75]
        band = {"pass_rates": str(table), "min_pass_rate": 0.01, "max_pass_rate": 0.5}
        assert sorted(problem.answer for problem in load({"path": path, **band})) == ["1", "2"]
    bad = write("bad.jsonl", [{"prompt_id": "q1", "n": 2, "correct": 3}])
    with pytest.raises(
        RowsFault, match="row 1: 3 of 2 attempts correct: n must be at least 1, and correct from 0 to n"
    ):
        load({"path": path, "pass_rates": bad, "max_pass_rate": 0.5})


def test_weights_shape_the_order_and_lose_nothing() -> None:
    queues = [[("a", n) for n in range(100)], [("b", n) for n in range(100)], []]
    order = mixed(queues, [0.9, 0.1, 1.0], seed=3)
    assert sorted(order) == sorted(queues[0] + queues[1])
    assert [each for each in order if each[0] == "a"] == queues[0]
    assert 38 <= sum(name == "a" for name, _ in order[:50]) <= 50
    assert order == mixed(queues, [0.9, 0.1, 1.0], seed=3) != mixed(queues, [0.9, 0.1, 1.0], seed=4)


def test_the_first_rows_of_a_mixture_have_the_shares_of_the_weights() -> None:
    draw = random.Random(0)
    queues = [[name] * 2000 for name in "ab"]
    shares = [mixed(queues, [3, 1], seed=draw.randrange(10**6))[:1000].count("a") for _ in range(5)]
    assert all(690 <= share <= 810 for share in shares), shares  # 4.4 standard deviations


def test_counts_and_sequence(write: Write) -> None:
    first, second = write("a.jsonl", questions(10)), write("b.jsonl", [{"question": "B?", "answer": "b"}])
    rows = load({"path": first, "count": 4, "shuffle": False}, {"path": second}, mode="sequential")
    assert [problem.answer for problem in rows] == ["0", "1", "2", "3", "b"]
    assert len(load({"path": first, "count": 4}, {"path": second})) == 5
    assert load({"path": first}, seed=1) != load({"path": first}, seed=2)


def test_rewards_of_a_dataset_go_before_those_of_the_environment_and_the_format(write: Write) -> None:
    path = write("gsm8k.jsonl", [ROWS["gsm8k"][0]])

    def names(dataset: Mapping[str, Any], **args: Any) -> list[str]:
        return [reward.fn for reward in load({"path": path, **dataset}, **args)[0].rewards]

    assert names({}) == ["gsm8k"]
    assert names({}, rewards=["exact", {"fn": "length", "weight": 0}]) == ["exact", "length"]
    assert names({"rewards": ["mine:score"]}, rewards=["exact"]) == ["mine:score"]


def test_without_an_answer_a_row_needs_a_reward_that_does_not_compare(write: Write) -> None:
    path = write("rows.jsonl", [{"question": "Free text?"}])
    with pytest.raises(RowsFault, match=r"row 0 \(format jsonl\) has none of the columns answer, .* it has question"):
        load({"path": path})
    assert load({"path": path}, rewards=["mine:score"])[0].answer == ""


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": ', r"rows\.jsonl:2: not valid JSON"),
        ("", "no rows are left"),
        ("[1]\n", "not a JSON object"),
        ('{"question": "  ", "answer": "b"}\n', "row 0 .* has an empty prompt"),
        ('{"messages": [], "answer": "b"}\n', "empty list of messages"),
        ('{"messages": [{"content": 3}], "answer": "b"}\n', "expected `role` and `content`"),
        ('{"question": "a\\u001b[31m", "label": null}\n', "has none of the columns answer"),
    ],
)
def test_a_damaged_source_is_one_line(rows: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(rows, encoding="utf-8")
    with pytest.raises(RowsFault, match=fault) as caught:
        load({"path": str(file)})
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_answers_and_tools_that_are_lists_of_objects(write: Write) -> None:
    calls = [{"name": "order", "arguments": {"mg": 1}}]
    path = write("calls.jsonl", [{"question": "Order it.", "answer": calls}])
    assert json.loads(load({"path": path})[0].answer) == calls
    unknown = write("gsm8k.jsonl", [{"question": "a", "answer": "#### 1", "tools": "calculator", "system": "x"}])
    (problem,) = load({"path": unknown})
    assert (problem.prompt[0]["role"], problem.tools) == ("user", ())
    given = {"name": "f", "description": None, "parameters": None}
    ours = write("tools.jsonl", [{"question": "a", "answer": "b", "tools": [{"type": "function", "function": given}]}])
    (info,) = load_environment(datasets=[{"path": ours}]).get_dataset()["info"]
    assert json.loads(info)["tool_defs"] == [{"description": "", "parameters": {}, "name": "f"}]
    nameless = write("nameless.jsonl", [{"question": "a", "answer": "b", "tools": [{"description": "c"}]}])
    with pytest.raises(RowsFault, match=r"nameless: a tool of the prompt [0-9a-f]+: name: Field required"):
        load_environment(datasets=[{"path": nameless}])


def test_a_missing_file_names_the_nearest(write: Write, tmp_path: Path) -> None:
    write("questions.jsonl", questions(1))
    with pytest.raises(RowsFault, match=r"no such file or directory; did you mean .*questions\.jsonl"):
        load({"path": str(tmp_path / "question.jsonl")})
    with pytest.raises(RowsFault, match=r"data files of the split 'test'"):
        load({"path": str(tmp_path), "split": "test"})


def test_a_directory_has_splits_and_a_saved_dataset_too(tmp_path: Path, write: Write) -> None:
    import datasets

    write("train-00000.jsonl", questions(2))
    write("test.jsonl", questions(3))
    assert len(load({"path": str(tmp_path), "split": "test"})) == 3
    assert len(load({"path": str(tmp_path)})) == 2
    saved = tmp_path / "saved"
    datasets.DatasetDict({"dev": datasets.Dataset.from_list(questions(4))}).save_to_disk(saved)
    assert len(load({"path": str(saved), "split": "dev"})) == 4
    with pytest.raises(RowsFault, match="has no split train; it has dev"):
        load({"path": str(saved)})


def test_faults_of_the_arguments_are_one_line_each() -> None:
    band = {"path": "a.jsonl", "min_pass_rate": 0.5, "min_chars": 5, "max_chars": 2, "template": r"\boxed{}"}
    datasets = [band, {"path": "gsm8k", "type": "sft"}, {"type": "gsm8"}, {"path": "a.jsonl", "weight": 0}, {}]
    with pytest.raises(ConfigError) as caught:
        read_rows_config({"datasets": datasets, "mode": "weigthed"})
    lines = caught.value.faults
    for part in (
        "datasets.0: min_chars (5) is above max_chars (2)",
        "datasets.0: min_pass_rate and max_pass_rate need `pass_rates`",
        "datasets.0: template: {} is not the name of a column; double the braces",
        "datasets.1: type = 'sft' is for `medarc_train sft`",
        "unknown format 'gsm8'; did you mean 'gsm8k'?",
        "datasets.3.weight: should be above 0",
        "datasets.4: path: give a file",
        "did you mean 'weighted'?",
    ):
        assert sum(part in line for line in lines) == 1, (part, lines)
    with pytest.raises(ConfigError, match=r"datasets\[1\] and datasets\[0\] are both called 'a': set `name`"):
        read_rows_config({"datasets": [{"path": "a.jsonl"}, {"path": "x/a.jsonl"}]})
    with pytest.raises(ConfigError, match="min_tokens and max_tokens need `tokenizer`"):
        read_rows_config({"datasets": [{"path": "a.jsonl", "max_tokens": 3}]})


def test_the_dummy_repeats_one_question_under_ids_of_its_own() -> None:
    problems = load({"type": "dummy", "count": 5})
    assert sorted(problem.id for problem in problems) == [f"dummy_{n}" for n in range(5)]
    assert {problem.answer for problem in problems} == {"5"}


async def test_each_row_is_scored_by_the_functions_of_its_dataset(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prime_rl.environments.rows.single_turn import load_environment

    scoring = "def same(completion_text, answer): return float(answer in completion_text)"
    (tmp_path / "scoring_of_rows.py").write_text(scoring, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    first: dict[str, Any] = {"path": write("first.jsonl", questions(1)), "rewards": ["scoring_of_rows:same"]}
    second: dict[str, Any] = {"path": write("second.jsonl", [{"question": "B?", "answer": "9"}])}
    second["rewards"] = [{"fn": "scoring_of_rows:same", "name": "double", "weight": 2}]
    env = load_environment(datasets=[first, second], mode="sequential")
    rows = env.get_dataset()
    assert rows["prompt_id"] == [problem.id for problem in load(first, second, mode="sequential")]
    states = [
        {**row, "info": json.loads(row["info"]), "input": row, "completion": [{"role": "assistant", "content": said}],
         "trajectory": [], "timing": {}}
        for row, said in zip(rows, ["It is 0.", "It is 9."], strict=True)
    ]  # fmt: skip
    try:
        for state in states:  # a group holds rollouts of one row
            await env.rubric.score_group([state])
    finally:
        await env._teardown()
    assert [state["reward"] for state in states] == [1.0, 2.0]
    scores = [
        {name: value for name, value in state["metrics"].items() if name in ("same", "double")} for state in states
    ]
    assert scores == [{"same": 1.0}, {"double": 1.0}]


def test_a_column_of_numbers_is_filtered_by_its_values(write: Write) -> None:
    grades = [1, -1, 1.0, 1.5, "1", "Grade 1"]
    rows = [{"question": f"{number}?", "answer": "1", "grade": grade} for number, grade in enumerate(grades)]
    dataset = {"path": str(write("grades.jsonl", rows)), "where": {"grade": [1]}, "shuffle": False}
    kept = load_problems(read_rows_config({"datasets": [dataset]}))
    assert [problem.row["grade"] for problem in kept] == [1, 1.0, "1", "Grade 1"]


def test_an_id_with_line_breaks_survives_a_curriculum(write: Write, tmp_path: Path) -> None:
    rows = [{"id": f"a\n{mark}b", "question": f"{mark!r}?", "answer": "1"} for mark in ("\u2028", "\x85x")]
    path = str(write("ids.jsonl", rows))
    ids = [problem.id for problem in load_problems(read_rows_config({"datasets": [{"path": path}]}))]
    write_order(ids[::-1], tmp_path / "order.txt")
    ordered = read_rows_config({"datasets": [{"path": path, "order": str(tmp_path / "order.txt")}]})
    assert [problem.id for problem in load_problems(ordered)] == ids[::-1]
