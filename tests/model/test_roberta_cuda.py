"""Features of sentences on a GPU in 16 bits: by CUDA graphs, with the bits of eager passes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.models.roberta import RobertaHubInterface
from helpers.parity import LS, MASKED, PAD, command_line
from helpers.searches import forbid_waits
from torch import Tensor

from lightseq_fairseq.plugins.encoder_graphs import EncoderGraphs

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
SIZES = {"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128, "encoder_attention_heads": 4,
         "max_positions": 512}  # fmt: skip
# Lengths of the sentences of each batch: buckets of one size with sentences of different lengths,
# a bucket without unused rows, and larger buckets.
LENGTHS = ((3, 4), (5,), (64,), (60, 2, 1), (40, 300, 7), (33,) * 64, (512,) * 5)


@pytest.fixture(scope="module")
def interface(tmp_path_factory: pytest.TempPathFactory) -> RobertaHubInterface:
    """An interface in float32 on the CPU; tests use copies."""
    data = parity.write_text(tmp_path_factory.mktemp("text"))
    cfg = parity.parse(command_line(data, LS, **{**MASKED, **SIZES}))
    task, model, _ = parity.build(cfg)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return RobertaHubInterface(cfg, task, model).eval()


def copied(interface: Any) -> Any:
    model = copy.deepcopy(interface.model)
    return RobertaHubInterface(interface.cfg, interface.task, model).to(interface.device).eval()


def on_gpu(interface: Any, dtype: torch.dtype) -> Any:
    return copied(interface).to("cuda", dtype)


def batch(lengths: Sequence[int], seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, parity.VOCABULARY, (len(lengths), max(lengths)), generator=random)
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = PAD
    return tokens


BATCHES = [batch(lengths) for lengths in LENGTHS]


def graphs(interface: Any) -> int:
    kept = interface.model.encoder.graphs._graphs
    return 0 if kept is None else len(kept._graphs)


def encode(interface: Any, batches: Sequence[Tensor] = BATCHES) -> list[Tensor]:
    """The features of each batch. All results exist at once, so none may overwrite another."""
    with torch.no_grad():
        return [interface.extract_features(tokens) for tokens in batches]


def eager(interface: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The features by a copy of the model that captures nothing."""
    with monkeypatch.context() as patched:
        patched.setenv("LIGHTSEQ_CAPTURE", "0")
        plain = copied(interface)
        found = encode(plain)
        assert graphs(plain) == 0
    return found


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@DTYPES
def test_captured_is_eager(
    interface: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = on_gpu(interface, dtype)
    runs = [encode(ours) for _ in range(3)]  # eager, captured, replayed
    assert 2 < graphs(ours) < len(BATCHES)  # batches share buckets
    expected = eager(ours, monkeypatch)
    for run in runs:
        assert_equal(run, expected)
    exact = encode(copied(ours).cpu().double())
    for tokens, found, reference in zip(BATCHES, expected, exact, strict=True):
        assert found.shape == (*tokens.shape, 64) and not found[tokens == PAD].any()
        assert (found.cpu() - reference).norm() < 0.03 * reference.norm()


@DTYPES
def test_pads_anywhere_and_batches_without_tokens(interface: Any, dtype: torch.dtype) -> None:
    ours = on_gpu(interface, dtype)
    on_the_right, on_the_left = batch((9, 4)), batch((9, 4))
    on_the_left[1] = on_the_right[1].roll(5)
    empty = [torch.full((2, 3), PAD), torch.zeros(0, 3, dtype=torch.int64)]
    for _ in range(3):
        right, left, *others = encode(ours, [on_the_right, on_the_left, *empty])
        assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1].roll(5, 0))
        assert [x.shape for x in others] == [(2, 3, 64), (0, 3, 64)]
        assert not any(x.any() for x in others)


def test_a_longer_sentence_later(interface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is captured with short sentences, and its bucket has room for a longer one."""
    ours = on_gpu(interface, torch.bfloat16)
    for _ in range(3):
        encode(ours, [batch((3, 4))])
    assert graphs(ours) == 1
    found = encode(ours, [batch((60,))])
    assert graphs(ours) == 1
    monkeypatch.setenv("LIGHTSEQ_CAPTURE", "0")
    assert_equal(found, encode(copied(ours), [batch((60,))]))


def test_a_batch_with_a_larger_block_later(interface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = on_gpu(interface, torch.float16)
    large = batch((250,) * 100)
    for _ in range(3):
        encode(ours)
    for _ in range(3):
        found = encode(ours, [*BATCHES, large])
    monkeypatch.setenv("LIGHTSEQ_CAPTURE", "0")
    assert_equal(found, encode(copied(ours), [*BATCHES, large]))


def test_graphs_see_new_weights(interface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = on_gpu(interface, torch.bfloat16)

    def changed_in_place() -> None:
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.mul_(1.1)

    def loaded() -> None:
        state = {name: value * 0.9 for name, value in ours.model.state_dict().items()}
        ours.model.load_state_dict(state)

    def replaced() -> None:
        norm = ours.model.encoder.sentence_encoder.layers[0].final_layer_norm
        norm.weight = torch.nn.Parameter(norm.weight.detach() * 2)

    def moved_by_a_new_head() -> None:
        ours.register_classification_head("kind", num_classes=3)
        ours.to("cuda", torch.bfloat16)

    def converted() -> None:
        ours.half()

    def moved_there_and_back() -> None:
        ours.cpu()
        ours.cuda()

    def without_a_layer() -> None:
        encoder = ours.model.encoder.sentence_encoder
        encoder.layers = encoder.layers[:-1]

    for _ in range(3):
        before = encode(ours)
    for change, has_new_results in (
        (changed_in_place, True), (loaded, True), (replaced, True), (moved_by_a_new_head, False),
        (converted, True), (moved_there_and_back, False), (without_a_layer, True),
    ):  # fmt: skip
        change()
        for _ in range(3):
            found = encode(ours)
            assert_equal(found, eager(ours, monkeypatch))
        same = all(map(torch.equal, found, before))
        assert same != has_new_results, change.__name__
        before = found


def test_a_copy_has_graphs_of_its_own(interface: Any) -> None:
    ours = on_gpu(interface, torch.float16)
    for _ in range(2):
        before = encode(ours)
    other = copied(ours)
    assert graphs(ours) > 0 == graphs(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_equal(encode(ours), before)
    for _ in range(3):
        assert not any(x.any() for x in encode(other))
    assert_equal(encode(ours), before)


def test_other_passes_are_eager(interface: Any) -> None:
    ours = on_gpu(interface, torch.bfloat16)
    tokens = BATCHES[0]
    for _ in range(3):
        assert ours.extract_features(tokens).requires_grad
        with torch.no_grad():
            ours.train().extract_features(tokens)
            ours.eval().model.encoder.sentence_encoder.layers.train()
            ours.extract_features(tokens)
            ours.eval().extract_features(tokens, return_all_hiddens=True)
            in_float32 = copied(ours).float()
            in_float32.extract_features(tokens)
            assert graphs(ours) == graphs(in_float32) == 0


def test_only_the_number_of_tokens_is_waited_for(
    interface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = on_gpu(interface, torch.bfloat16)
    for _ in range(3):
        encode(ours)
    calls = forbid_waits(monkeypatch, (EncoderGraphs, "_features"))
    encode(ours)
    assert calls == ["_features"] * len(BATCHES)


def test_streams_and_inference_mode(interface: Any) -> None:
    ours = on_gpu(interface, torch.bfloat16)
    with torch.inference_mode():
        first = encode(ours)
    for _ in range(2):
        expected = encode(ours)
    assert_equal(first, expected)
    torch.cuda.synchronize()
    found = []
    for tokens in BATCHES:
        with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
            found.append(ours.extract_features(tokens))
    torch.cuda.synchronize()
    assert_equal(found, expected)
