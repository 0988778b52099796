"""examples/serve/ray_app.py: replicas of Ray Serve answer with the words of the model offline.

Ray is large, so the extra ``test`` does not have it: pip install 'ray[serve]'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import helpers.digits as digits
import pytest
from helpers.interpreters import ROOT

from lightseq_fairseq import Translator

pytest.importorskip("ray.serve", reason="Ray is not installed")

LINES = ["eins zwei drei", "neun acht", "vier fünf sechs sieben", "null"] * 5
# In a process of its own, since Ray changes signals and logs.
CLIENT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor

import httpx, ray, yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from examples.serve.ray_app import application

command, lines = sys.argv[1], json.loads(sys.argv[2])
with open("examples/serve/ray.yaml") as file:
    (settings,) = ServeDeploySchema.model_validate(yaml.safe_load(file)).applications
assert settings.import_path == "examples.serve.ray_app:application"
assert settings.args.keys() == {"command"}
(deployment,) = settings.deployments
bound = application({"command": command})._bound_deployment
assert bound.name == deployment.name

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
serve.start(http_options={"port": port})
two = bound.options(num_replicas=2, ray_actor_options={"num_cpus": 1})
serve.run(two.bind(), route_prefix="/")


def ask(line):
    url = f"http://127.0.0.1:{port}/translate"
    answer = httpx.post(url, json={"q": line}, timeout=60)
    answer.raise_for_status()
    return answer.json()["translatedText"]


with ThreadPoolExecutor(4) as clients:
    found = [*clients.map(ask, lines)]
(status,) = serve.status().applications.values()
replicas = status.deployments["lightseq"].replica_states
serve.shutdown()
print(json.dumps([found, replicas]))
"""


def test_two_replicas() -> None:
    path = str(digits.toy().paths[-1])
    model = Translator.from_pretrained(path, source_lang="src", device="cpu")
    expected = [each.text for each in model.translate(LINES)]
    command = f"digits={path} --source-lang src --cpu --workers 1"
    found = subprocess.run(
        [sys.executable, "-c", CLIENT, command, json.dumps(LINES)], capture_output=True, text=True,
        cwd=ROOT, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == [expected, {"RUNNING": 2}]
