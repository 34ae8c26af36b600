"""GGUF variants, with llama.cpp's tools: convert, compute an importance matrix, quantize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from powerband.core.engine import Step
from powerband.core.model import Format, Model
from powerband.errors import InputError
from powerband.quantizers.base import Job, Quantizer, partial_path

_CHUNKS, _CHUNK_TOKENS = 64, 512  # of calibration text


class Gguf(Quantizer):
    """k-quants and other GGUF schemes."""

    name: ClassVar[str] = "gguf"
    schemes: ClassVar[tuple[str, ...]] = (
        "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_nl", "q3_k_m", "q2_k"
    )  # fmt: skip
    format: ClassVar[Format] = "gguf"
    tools: ClassVar[tuple[str, ...]] = ("llamacpp", "llmcompressor")

    def check(self, model: Model, scheme: str) -> None:
        """Reject a GGUF that is already quantized: the errors of both quantizations would add up."""
        if model.format == "gguf" and model.weight_format not in ("f16", "bf16", "f32"):
            raise InputError(
                f"{model.source} is already quantized ({model.weight_format})",
                hint="give the original safetensors, or an f16 or bf16 GGUF",
            )

    def file(self, job: Job) -> str:
        """Return the name of the GGUF file."""
        return f"{job.model.name}.{job.scheme.upper()}.gguf"

    def steps(self, job: Job, tools: Mapping[str, str]) -> tuple[Step, ...]:
        """Convert the model to GGUF if needed, compute an importance matrix if there is calibration text, quantize."""
        target, source, found = f"{job.folder}/{self.file(job)}", job.weights, []
        if job.model.format != "gguf":
            base = "" if job.scheme == "f16" else f"{job.shared}/base.gguf"
            found.append(_convert(job, tools, base or target, shared=base))
            source = base
        if job.scheme == "f16" and job.model.format != "gguf":
            return tuple(found)
        matrix: tuple[str, ...] = ()
        if job.plain_text and job.scheme not in ("f16", "q8_0"):
            path = f"{job.shared}/importance.gguf"
            imatrix = (tools["llama-imatrix"], "--model", source, "--file", job.plain_text,
                       "--output-file", partial_path(path), "--ctx-size", str(_CHUNK_TOKENS),
                       "--chunks", str(_CHUNKS), "--threads", str(job.threads))  # fmt: skip
            found.append(Step(title="compute the importance matrix", argv=imatrix, makes=path))
            matrix = ("--imatrix", path)
        quantize = (tools["llama-quantize"], *matrix, source, target, job.scheme.upper(), str(job.threads))
        found.append(Step(title=f"quantize to {job.scheme}", argv=quantize))
        return tuple(found)


def _convert(job: Job, tools: Mapping[str, str], target: str, *, shared: str) -> Step:
    """Return the command that converts the model to a 16-bit GGUF."""
    converters = tools["converters"]
    convert = (tools["python"], f"{converters}/convert_hf_to_gguf.py", job.weights)
    argv = (*convert, "--outfile", partial_path(shared) if shared else target, "--outtype", "bf16" if shared else "f16")
    env = {"PYTHONPATH": f"{converters}/gguf-py:{converters}", "HF_HUB_OFFLINE": "1"}
    return Step(title="convert to GGUF", argv=argv, env=env, makes=shared)


QUANTIZER = Gguf()
