"""Ray Serve's LLM config, for vLLM only: Ray Serve runs no other engine."""

from __future__ import annotations

from typing import Any

from powerband.core.recipe import Recipe
from powerband.errors import InputError
from powerband.export.container import deployment, to_yaml


def files(recipe: Recipe) -> dict[str, str]:
    """Return the config for `serve run`."""
    own = deployment(recipe)
    if own.engine != "vllm":
        raise InputError(
            f"Ray Serve supports only vLLM; this recipe uses {own.engine}", hint="use 'powerband serve --launcher ray'"
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
    return {"serve.yaml": to_yaml({"applications": [application]})}
