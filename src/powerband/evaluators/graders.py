"""Graders of task answers, run by lm-evaluation-harness in its own interpreter. A higher score is better."""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

Doc = dict[str, Any]
Score = dict[str, float]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TIMEOUT_S = 10


def number(doc: Doc, results: list[str]) -> Score:
    """Score 1 if the last number before the next 'Question:' is the expected one."""
    expected = float(doc["answer"].split("####")[-1].strip().replace(",", ""))
    numbers = _NUMBER.findall(results[0].split("Question:")[0])
    return {"score": float(bool(numbers) and float(numbers[-1].replace(",", "")) == expected)}


def letter(doc: Doc, results: list[str]) -> Score:
    """Score 1 if the first letter from A to D is the expected one."""
    found = re.search(r"\b([A-D])\b", results[0])
    return {"score": float(found is not None and "ABCD".index(found[1]) == doc["answer"])}


def passes(doc: Doc, results: list[str]) -> Score:
    """Score 1 if the generated function passes the task's tests, in a separate process with a time limit."""
    body = re.split(r"\n(?=\S)", results[0])[0]
    whole = f"{doc['prompt']}{body}\n\n{doc['test']}\n\ncheck({doc['entry_point']})\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", whole], cwd=folder, capture_output=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return {"score": 0.0}
    return {"score": float(done.returncode == 0)}


def bytes_per_bit(doc: Doc, results: list[Any]) -> Score:
    """Score a page by its bytes per bit of information: the better the model predicts the page, the higher."""
    found = results[0]
    likelihood = float(found[0] if isinstance(found, (list, tuple)) else found)
    return {"score": len(doc["page"].encode()) / (-likelihood / math.log(2))}


def _count(found: int, expected: int, relation: str | None) -> bool:
    return found < expected if relation == "less than" else found >= expected


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _is_json(text: str) -> bool:
    body = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE | re.MULTILINE).strip()
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def _has(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


# IFEval instructions that can be checked without a language detector or a sentence splitter.
INSTRUCTIONS: dict[str, Callable[[str, Doc], bool]] = {
    "punctuation:no_comma": lambda text, _: "," not in text,
    "length_constraints:number_words": lambda text, k: _count(len(_words(text)), k["num_words"], k["relation"]),
    "keywords:forbidden_words": lambda text, k: not any(_has(word, text) for word in k["forbidden_words"]),
    "keywords:existence": lambda text, k: all(_has(word, text) for word in k["keywords"]),
    "keywords:frequency": lambda text, k: _count(
        len(re.findall(re.escape(k["keyword"]), text, re.IGNORECASE)), k["frequency"], k["relation"]
    ),
    "keywords:letter_frequency": lambda text, k: _count(
        text.lower().count(k["letter"].lower()), k["let_frequency"], k["let_relation"]
    ),
    "detectable_format:number_highlighted_sections": lambda text, k: (
        len(re.findall(r"\*[^\n*]+\*", text)) >= k["num_highlights"]
    ),
    "detectable_format:title": lambda text, _: re.search(r"<<[^\n]+>>", text) is not None,
    "detectable_format:number_bullet_lists": lambda text, k: (
        len(re.findall(r"^\s*[*-]\s", text, re.MULTILINE)) == k["num_bullets"]
    ),
    "detectable_format:json_format": lambda text, _: _is_json(text),
    "detectable_content:number_placeholders": lambda text, k: (
        len(re.findall(r"\[.*?\]", text)) >= k["num_placeholders"]
    ),
    "detectable_content:postscript": lambda text, k: k["postscript_marker"].lower() in text.lower(),
    "startend:quotation": lambda text, _: text.strip().startswith('"') and text.strip().endswith('"'),
    "startend:end_checker": lambda text, k: text.strip().lower().endswith(k["end_phrase"].strip().lower()),
    "change_case:english_lowercase": lambda text, _: text == text.lower(),
    "change_case:english_capital": lambda text, _: text == text.upper(),
    "length_constraints:number_paragraphs": lambda text, k: (
        len([part for part in re.split(r"\s*\*\*\*\s*", text) if part.strip()]) == k["num_paragraphs"]
    ),
    "combination:two_responses": lambda text, _: len([one for one in text.split("******") if one.strip()]) == 2,
}


def followed(doc: Doc, results: list[str]) -> Score:
    """Score the share of a prompt's instructions that the answer follows; an empty answer follows none."""
    text = results[0]
    instructions = zip(doc["instruction_id_list"], doc["kwargs"], strict=True)
    passed = [bool(text.strip()) and INSTRUCTIONS[name](text, kwargs) for name, kwargs in instructions]
    return {"score": sum(passed) / len(passed)}


def gradable(docs: Any) -> Any:
    """Keep the prompts whose instructions can all be checked."""
    return docs.filter(lambda doc: all(name in INSTRUCTIONS for name in doc["instruction_id_list"]))
