"""lightseq-serve by Ray Serve, which starts replicas, shares requests among them, and adds some
under load. ray.yaml has its settings."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ray import serve

if TYPE_CHECKING:
    from fastapi import FastAPI


def application(arguments: dict[str, str]) -> Any:
    """What ``import_path`` of ray.yaml names.

    arguments: "command" has the words after lightseq-serve.
    """
    words = shlex.split(arguments["command"])

    def server() -> FastAPI:  # in each replica
        from lightseq_fairseq.cli.serve import engines_of
        from lightseq_fairseq.cli.serving.app import application

        return application(*engines_of(words))

    return serve.deployment(serve.ingress(server)(), name="lightseq").bind()
