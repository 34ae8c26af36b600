"""lm-evaluation-harness: installed in a separate environment, run against the served endpoint on local data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from powerband.core.engine import InstallPlan, Step
from powerband.core.host import Host
from powerband.errors import InputError
from powerband.evaluators import graders

_LIKELIHOOD_TASKS = ("wikitext",)  # score the log-likelihood of a given text instead of an answer
_CODE_TASKS = ("humaneval",)  # run code that the model writes


class LmEval:
    """lm-evaluation-harness as an installable tool."""

    name: ClassVar[str] = "lmeval"
    default_version: ClassVar[str | None] = "0.4.13"
    help_args: ClassVar[tuple[str, ...]] = ("-m", "lm_eval", "--help")

    def install_plan(self, version: str, host: Host) -> InstallPlan:
        """Install lm-eval with its API client and tokenizers, without torch."""
        python = "{home}/bin/python"
        pip = (python, "-m", "pip", "install", "--quiet")
        return InstallPlan(
            engine=self.name,
            version=version,
            build="api",
            steps=(
                Step(title="create a virtual environment", argv=("{python}", "-m", "venv", "{home}")),
                Step(
                    title=f"install lm-eval {version}",
                    argv=(*pip, f"lm-eval[api]=={version}", "transformers", "jinja2"),
                ),
            ),
            program=(python,),
            tools={"python": python},
        )


def check(task: str, *, echoes_prompt_logprobs: bool, run_code: bool) -> None:
    """Raise if a task cannot run: the engine lacks prompt log-probabilities, or running code is not allowed."""
    if task in _LIKELIHOOD_TASKS and not echoes_prompt_logprobs:
        raise InputError(
            f"{task} needs log-probabilities of prompt tokens, which llama-server's OpenAI endpoint does not return",
            hint=f"omit --task {task}: perplexity_ratio measures the same and is part of every evaluation",
        )
    if task in _CODE_TASKS and not run_code:
        raise InputError(f"{task} runs code that the model writes on this machine", hint="allow it with --run-code")


def write(folder: Path, task_yaml: str, data: Path) -> None:
    """Write a task definition and its graders to the folder that `--include_path` names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.yaml").write_text(task_yaml.replace("{data}", str(data)))
    (folder / "graders.py").write_text(Path(graders.__file__).read_text())


def rows(task: str, data: Path) -> list[int]:
    """Return the rows of the data that the task can grade."""
    lines = [line for line in data.read_text().splitlines() if line.strip()]
    if task == "ifeval":
        lines = [line for line in lines if graders.INSTRUCTIONS.keys() >= set(json.loads(line)["instruction_id_list"])]
    return list(range(len(lines)))


def command(
    python: str,
    task: str,
    *,
    folder: Path,
    url: str,
    model: str,
    tokenizer: str,
    samples: Sequence[int],
    concurrency: int,
) -> Step:
    """Return the command that scores the given rows; it writes each score to `samples_*.jsonl` under the folder."""
    model_args = {"model": model, "base_url": f"{url}/v1/completions", "num_concurrent": concurrency, "max_retries": 3}
    if task in _LIKELIHOOD_TASKS:
        model_args |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface", "max_length": 1024}
    else:
        model_args |= {"tokenizer_backend": "None", "tokenized_requests": "False"}
    argv = [python, "-m", "lm_eval", "run", "--model", "local-completions"]
    argv += ["--model_args", ",".join(f"{key}={value}" for key, value in model_args.items())]
    argv += ["--tasks", f"powerband_{task}", "--include_path", str(folder), "--batch_size", "1"]
    argv += ["--samples", json.dumps({f"powerband_{task}": list(samples)})]
    argv += ["--log_samples", "--output_path", str(folder / "output")]
    argv += ["--confirm_run_unsafe_code"] if task in _CODE_TASKS else []
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OPENAI_API_KEY": "none"}
    return Step(title=f"score {len(samples)} rows of {task}", argv=tuple(argv), env=env)


def scores(folder: Path, samples: Sequence[int]) -> list[float]:
    """Return the score of each row."""
    found: dict[int, float] = {}
    for file in (folder / "output").rglob("samples_*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[row["doc_id"]] = float(row["score"])
    return [found[number] for number in samples]


TOOL = LmEval()
