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
    if own.variant.revision:
        arguments["revision"] = own.variant.revision
    model = {
        "model_loading_config": {"model_id": own.served_name, "model_source": own.variant.source},
        "engine_kwargs": arguments,
        "runtime_env": {"env_vars": {name: str(one) for name, one in environment.items()}},
        "placement_group_config": _placement(recipe, knobs.get("distributed_executor_backend") == "ray"),
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
    }
    application = {
        "name": own.served_name,
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [model]},
    }
    return {"serve.yaml": to_yaml({"applications": [application]})}


def _placement(recipe: Recipe, over_nodes: bool) -> dict[str, Any]:
    """Return a bundle for each GPU, on one node unless a replica spans several; without a GPU, a bundle of one CPU."""
    bundles = [{"CPU": 1, "GPU": 1} for _ in range(recipe.gpus)] or [{"CPU": 1}]
    return {"bundles": bundles, "strategy": "PACK" if over_nodes else "STRICT_PACK"}
