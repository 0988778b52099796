"""examples/serve/triton: the model of Triton's Python backend, against the interface that the
backend documents."""

from __future__ import annotations

import importlib.util
import json
import queue
import sys
import types
from collections.abc import Iterator
from typing import Any

import helpers.counting as counting
import helpers.digits as digits
import numpy as np
import pytest
from helpers.interpreters import ROOT

from lightseq_fairseq import LanguageModel, Translator

FINAL = 1
FOLDER = ROOT / "examples" / "serve" / "triton" / "lightseq"


class Tensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values


class Request:
    """A request of the backend, and the responses that it has got."""

    def __init__(self, path: str, **body: Any) -> None:
        self.inputs = {"PATH": path.encode(), "BODY": json.dumps(body).encode()}
        self.responses: queue.Queue[tuple[Any, int]] = queue.Queue()

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        return False

    def send(self, response: Any, flags: int = 0) -> None:
        self.responses.put((response, flags))

    def answers(self) -> list[tuple[int, str]]:
        """Status and text of each response, up to the last one."""
        found, flags = [], 0
        while flags != FINAL:
            response, flags = self.responses.get(timeout=30)
            status, answer = (each.as_numpy() for each in response.output_tensors())
            assert status.dtype == np.int32
            found.append((int(status[0]), answer[0].decode()))
        return found


class InferenceResponse:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def output_tensors(self) -> list[Tensor]:
        return self._tensors


@pytest.fixture(scope="module", name="model")
def initialized() -> Iterator[Any]:
    backend = types.ModuleType("triton_python_backend_utils")
    vars(backend).update(
        Tensor=Tensor,
        InferenceResponse=InferenceResponse,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        get_input_tensor_by_name=lambda request, name: Tensor(
            name, np.array([request.inputs[name]], np.object_)
        ),
    )
    sys.modules[backend.__name__] = backend
    spec = importlib.util.spec_from_file_location("triton_model", FOLDER / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    models = f"digits={digits.toy().paths[-1]} counting={counting.toy().folder / 'ours.pt'}"
    settings = {"parameters": {"command": {"string_value": f"{models} --workers 1"}}}
    model = module.TritonPythonModel()
    model.initialize({"model_config": json.dumps(settings)})
    yield model
    model.finalize()
    del sys.modules[backend.__name__]


def test_requests(model: Any) -> None:
    lines = ["eins zwei drei", "neun acht"]
    offline = Translator.from_pretrained(digits.toy().paths[-1], source_lang="src", device="cpu")
    good = Request("/translate", q=lines, beam=4)
    bad = Request("/translate", q=lines, colour="red")
    unknown = Request("/nowhere")
    model.execute([good, bad, unknown])
    ((status, answer),) = good.answers()
    expected = [each.text for each in offline.translate(lines, beam=4)]
    assert (status, json.loads(answer)) == (200, {"translatedText": expected})
    assert bad.answers() == [(400, '{"error":"There is no option colour."}')]
    assert unknown.answers()[0][0] == 404


def test_a_stream_is_several_responses(model: Any) -> None:
    prompt, options = "three five", {"max_tokens": 7, "temperature": 0}
    request = Request("/v1/completions", model="counting", prompt=prompt, stream=True, **options)
    model.execute([request])
    answers = request.answers()
    assert {status for status, _ in answers} == {200}
    events = "".join(answer for _, answer in answers).split("\n\n")[:-2]
    found = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    path = counting.toy().folder / "ours.pt"
    offline = LanguageModel.from_pretrained(path, device="cpu")
    ((expected,),) = offline.generate([prompt], beam=1, max_len_a=1, max_len_b=6)
    assert prompt + "".join(found) == expected.text
    assert len(answers) > 3


def test_the_settings_name_the_tensors() -> None:
    text = (FOLDER / "config.pbtxt").read_text()
    for name in ("PATH", "BODY", "STATUS", "ANSWER", "command"):
        assert f'"{name}"' in text
