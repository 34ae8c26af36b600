"""Ray Serve's LLM config; vLLM only, which is the one engine that it runs."""

from __future__ import annotations

from typing import Any

from powerband.core.recipe import Recipe
from powerband.errors import InputError
from powerband.export.container import deployment, text


def files(recipe: Recipe) -> dict[str, str]:
    """Return the config of `serve run`."""
    own = deployment(recipe)
    if own.engine != "vllm":
        raise InputError(
            f"Ray Serve runs vLLM, and this recipe is for {own.engine}", hint="use 'powerband serve --launcher ray'"
        )
    knobs: dict[str, Any] = own.config.model_dump(mode="json", exclude_defaults=True)
    environment = {**knobs.pop("extra_env", {}), **{name: one for name, one in knobs.items() if name.isupper()}}
    arguments = {name: one for name, one in knobs.items() if name.islower() and name != "extra_args"}
    model = {
        "model_loading_config": {"model_id": own.served_name, "model_source": own.variant.source},
        "engine_kwargs": arguments,
        "runtime_env": {"env_vars": {name: str(one) for name, one in environment.items()}},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
    }
    application = {
        "name": own.served_name,
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [model]},
    }
    return {"serve.yaml": text({"applications": [application]})}
