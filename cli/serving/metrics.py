"""What Prometheus reads of the server."""

from __future__ import annotations

import functools

import prometheus_client as prometheus

from lightseq_fairseq.cli.serving.engines import Engines

_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """What Prometheus reads at ``/metrics``."""

    def __init__(self, engines: Engines) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "lightseq_requests", "Requests by path and status.", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self.seconds = prometheus.Histogram(
            "lightseq_request_seconds", "Time of a request.", ["path"], buckets=_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.tokens = prometheus.Counter(
            "lightseq_tokens", "Tokens of texts and of results.", ["kind"], registry=registry
        )
        for place, (name, says) in enumerate(
            (("waiting", "that wait"), ("searched", "that are searched"), ("slots", "at most"))
        ):
            gauge = prometheus.Gauge(
                f"lightseq_sentences_{name}", f"Sentences {says}.", ["model"], registry=registry
            )
            for model in engines.models:
                gauge.labels(model).set_function(functools.partial(_of, engines, model, place))
        memory = prometheus.Gauge(
            "lightseq_gpu_memory_bytes", "Memory that torch has on the GPU.", registry=registry
        )
        memory.set_function(lambda: 0 if engines.state is None else engines.state.memory)


def _of(engines: Engines, model: str, place: int) -> int:
    return 0 if engines.state is None else engines.state.models[model][place]
