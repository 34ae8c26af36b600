"""lm-evaluation-harness: in an environment of its own, against the served endpoint, on local data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from powerband.core.engine import InstallPlan, Step
from powerband.core.host import Host
from powerband.errors import InputError
from powerband.evaluators import graders

_READS = ("wikitext",)  # tasks that ask how likely a text is, not for an answer
_RUNS_CODE = ("humaneval",)


class LmEval:
    """The tool, as something that is installed."""

    name: ClassVar[str] = "lmeval"
    default_version: ClassVar[str | None] = "0.4.13"
    help_args: ClassVar[tuple[str, ...]] = ("-m", "lm_eval", "--help")

    def install_plan(self, version: str, host: Host) -> InstallPlan:
        """The requests and the tokenizers come along; torch does not."""
        python = "{home}/bin/python"
        pip = (python, "-m", "pip", "install", "--quiet")
        return InstallPlan(
            engine=self.name,
            version=version,
            build="api",
            steps=(
                Step(title="make an environment", argv=("{python}", "-m", "venv", "{home}")),
                Step(
                    title=f"install lm-eval {version}",
                    argv=(*pip, f"lm-eval[api]=={version}", "transformers", "jinja2"),
                ),
            ),
            program=(python,),
            tools={"python": python},
        )


def check(task: str, *, tells_prompts: bool, run_code: bool) -> None:
    """Refuse what cannot be run here, before anything starts."""
    if task in _READS and not tells_prompts:
        raise InputError(
            f"{task} asks how likely a given text is, which llama-server's OpenAI endpoint does not tell",
            hint="perplexity_ratio asks the same, and is part of every evaluation",
        )
    if task in _RUNS_CODE and not run_code:
        raise InputError(f"{task} runs code that a model wrote on this machine", hint="allow it with --run-code")


def write(folder: Path, described: str, data: Path) -> None:
    """Write a task and its marks where the harness is told to look."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.yaml").write_text(described.replace("{data}", str(data)))
    (folder / "marks.py").write_text(Path(graders.__file__).read_text())


def rows(task: str, data: Path) -> list[int]:
    """Return which rows of the data the task asks."""
    lines = [line for line in data.read_text().splitlines() if line.strip()]
    if task == "ifeval":
        lines = [line for line in lines if graders.INSTRUCTIONS.keys() >= set(json.loads(line)["instruction_id_list"])]
    return list(range(len(lines)))


def command(
    python: str, task: str, *, folder: Path, url: str, model: str, tokenizer: str, samples: Sequence[int], at_once: int
) -> Step:
    """Return the command that asks some rows; `samples_*.jsonl` under the folder tell each one's score."""
    told = {"model": model, "base_url": f"{url}/v1/completions", "num_concurrent": at_once, "max_retries": 3}
    if task in _READS:
        told |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface", "max_length": 1024}
    else:
        told |= {"tokenizer_backend": "None", "tokenized_requests": "False"}
    argv = [python, "-m", "lm_eval", "run", "--model", "local-completions"]
    argv += ["--model_args", ",".join(f"{key}={value}" for key, value in told.items())]
    argv += ["--tasks", f"powerband_{task}", "--include_path", str(folder), "--batch_size", "1"]
    argv += ["--samples", json.dumps({f"powerband_{task}": list(samples)})]
    argv += ["--log_samples", "--output_path", str(folder / "said")]
    argv += ["--confirm_run_unsafe_code"] if task in _RUNS_CODE else []
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OPENAI_API_KEY": "none"}
    return Step(title=f"ask {len(samples)} of {task}", argv=tuple(argv), env=env)


def scores(folder: Path, samples: Sequence[int]) -> list[float]:
    """Read what each row scored."""
    found: dict[int, float] = {}
    for file in (folder / "said").rglob("samples_*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[row["doc_id"]] = float(row["score"])
    return [found[number] for number in samples]


TOOL = LmEval()
