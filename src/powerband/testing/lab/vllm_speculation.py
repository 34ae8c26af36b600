"""What vLLM refuses in a speculative configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powerband.core.model import Model, from_config_json
from powerband.testing.lab.flags import Option
from powerband.testing.lab.vllm_files import config_json
from powerband.testing.lab.vllm_log import Refused


def speculation(given: Mapping[str, Any], options: Sequence[Option], model: Model) -> dict[str, Any] | None:
    """Return the speculative configuration of the options; None: no speculation."""
    config = _collected(given)
    if not config:
        return None
    names = {name: one for one in options for name in one.names}
    for key, value in config.items():
        if key not in names["--speculative-config"].keys:
            raise _invalid(key, "Unexpected keyword argument", "unexpected_keyword_argument", value)
    method, drafts = config.get("method"), config.get("num_speculative_tokens")
    methods = names["--spec-method"].choices
    if method is not None and method not in methods:
        raise _invalid("method", f"Input should be {', '.join(map(repr, methods))}", "literal_error", method)
    if drafts is not None and not isinstance(drafts, int):
        raise _invalid("num_speculative_tokens", "Input should be a valid integer", "int_type", drafts)
    if config.get("model") is None and method is None:
        raise _refused("num_speculative_tokens was provided but without speculative model.")
    if method == "suffix":
        raise Refused(
            "Arctic Inference is required for suffix decoding. Install via `pip install arctic-inference==0.1.1`.",
            error="ImportError",
        )
    if method in ("ngram", "ngram_gpu"):
        least, most = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
        least, most = least or most or 5, most or least or 5
        if least > most:
            raise _refused(f"prompt_lookup_min={least} must be <= prompt_lookup_max={most}")
    elif method and method.endswith("mtp"):
        if not (model.shape and model.shape.mtp_parameters):
            raise Refused("Unsupported speculative method: 'mtp'", error="NotImplementedError")
    elif config.get("model"):
        _check_draft(config, model)
    if drafts is None:
        raise _refused(
            "num_speculative_tokens must be provided with speculative model unless the draft model config contains "
            "an n_predict parameter."
        )
    if drafts <= 0:
        raise _refused(f"Expected num_speculative_tokens to be greater than zero ({drafts}).")
    return config


def _collected(given: Mapping[str, Any]) -> dict[str, Any]:
    config = {key.replace("-", "_"): value for key, value in (given.get("speculative_config") or {}).items()}
    for flag, key in (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")):
        if given.get(flag) is None:
            continue
        if key in config:
            raise Refused(f"--{flag.replace('_', '-')} and --speculative-config['{key}'] are mutually exclusive")
        config[key] = given[flag]
    return config


def _check_draft(config: Mapping[str, Any], model: Model) -> None:
    source = str(config["model"])
    draft = from_config_json(config_json(Path(source)), source=source, weight_bytes=None)
    if config.get("method") in (None, "draft_model") and draft.vocabulary != model.vocabulary:
        raise _refused(
            "Target and draft model should have the same vocabulary size. Target model "
            f"vocab_size={model.vocabulary}. Draft model vocab_size={draft.vocabulary}. Using models with different "
            "tokenizers can cause out-of-bounds errors during speculative decoding."
        )


def check_weights(config: Mapping[str, Any] | None, *, process: str) -> None:
    """Refuse a draft model whose weights are not those of a draft head."""
    if config and config.get("method") in ("eagle", "eagle3") and config.get("model"):
        names = config_json(Path(config["model"])).get("architectures") or []
        if not any("eagle" in name.lower() for name in names):
            raise Refused("There is no module or parameter named 'model' in LlamaModel.", process=process)


def _refused(text: str) -> Refused:
    return Refused(text, config="SpeculativeConfig")


def _invalid(key: str, text: str, kind: str, value: Any) -> Refused:
    said = f"{key}\n  {text} [type={kind}, input_value={value!r}, input_type={type(value).__name__}]"
    return Refused(said, error="ValidationError", config="SpeculativeConfig")
