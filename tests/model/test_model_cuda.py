"""Layers and a whole model on a GPU, against the same model in float64 on a CPU.

The rule of the ops holds for their compositions: our error is at most twice that of plain torch in
the same precision. Plain is the same model on the same GPU with every op's reference in the place
of its kernel; all three draw the same dropout masks from the same rng.

C model width, F ffn width, V vocabulary, H heads.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightseq_fairseq import layers, ops
from lightseq_fairseq.memory.packing import Segments

C, F, V, H, PAD = 128, 512, 1000, 2, 1
RATES = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
# Rows: one token; up to one tile, on both sides of 32, 64 and 128; more than one tile.
SOURCE = [1, 7, 31, 33, 64, 90, 129, 40, 28, 17]
TARGET = [3, 8, 29, 35, 61, 97, 140, 1, 28, 64]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
NORMS = pytest.mark.parametrize("normalize_before", [False, True], ids=["post-norm", "pre-norm"])
Results = dict[str, Tensor]


class Model(nn.Module):
    """A small Transformer with tied embeddings, from packed tokens to the loss of each token."""

    def __init__(self, normalize_before: bool, activation: str) -> None:
        super().__init__()
        options: dict[str, Any] = {
            **RATES, "normalize_before": normalize_before, "activation": activation,
        }  # fmt: skip
        self.table = layers.Embedding(V, C, PAD, dropout=RATES["dropout"], learned=True)
        self.encoder = nn.ModuleList(
            layers.EncoderLayer(C, F, H, **options, site=8 * i) for i in (1, 2)
        )
        self.decoder = nn.ModuleList(
            layers.DecoderLayer(C, F, H, **options, site=8 * i) for i in (3, 4)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(2)) if normalize_before else None

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Results:
        at, rng = source.device, make_rng(source.device)
        sources, targets = segments(SOURCE, at), segments(TARGET, at)
        encoder_norm, decoder_norm = self.norms if self.norms is not None else (None, None)
        x = self.table(source, sources, rng, site=0)
        memory = layers.run_encoder(self.encoder, encoder_norm, x, sources, rng)
        y = self.table(target, targets, rng, site=1)
        y = layers.run_decoder(self.decoder, decoder_norm, y, memory, targets, sources, rng)
        logits = layers.linear(y, self.table.weight)
        loss, nll, _ = layers.label_smoothed_cross_entropy(logits, labels, 0.1, PAD)
        return {"memory": memory, "y": y, "loss": loss, "nll": nll}


def make_rng(device: torch.device | str) -> Tensor:
    return torch.tensor([99, 4], device=device)


def segments(lengths: list[int], device: torch.device | str) -> Segments:
    return Segments.from_lengths(torch.tensor(lengths, device=device))


def seeded_weights(module: nn.Module) -> nn.Module:
    """Random weights; biases and norms differ from zero and one, so that their use is tested
    too."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def results_of(
    module: nn.Module, inputs: tuple[Tensor, ...], call: Callable[..., Results]
) -> Results:
    """Outputs, and gradients of the parameters and inputs for one fixed weighting of the
    outputs."""
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = call(module, *leaves)
    weighted = [name for name, x in outputs.items() if x.requires_grad]
    generator = torch.Generator().manual_seed(8)
    weights = [torch.randn(outputs[n].shape, generator=generator) for n in weighted]
    grads = [w.to(outputs[n]) for n, w in zip(weighted, weights, strict=True)]
    torch.autograd.backward([outputs[n] for n in weighted], grads)
    found = dict(outputs)
    found |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves) if x.is_leaf}
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return {name: x.detach().double().cpu() for name, x in found.items() if x is not None}


@contextlib.contextmanager
def with_references() -> Iterator[None]:
    """Every op runs its reference instead of its kernel."""
    with torch.library._scoped_library("lightseq", "IMPL") as library:
        for name, reference in ops.REFERENCES.items():
            library.impl(name, reference, "CUDA", allow_override=True)
        yield


def check(
    module: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype, call: Callable[..., Results]
) -> None:
    """Compares the error of every output and gradient, in the 2-norm, with that of plain torch."""
    low = seeded_weights(module).to(dtype)

    def on(device: str, as_dtype: torch.dtype) -> Results:
        where = {"device": device, "dtype": as_dtype}
        rows = (x.to(dtype).to(**where) if x.is_floating_point() else x.to(device) for x in inputs)
        return results_of(copy.deepcopy(low).to(**where), tuple(rows), call)

    exact, ours = on("cpu", torch.float64), on("cuda", dtype)
    with with_references():
        plain = on("cuda", dtype)
    assert ours.keys() == plain.keys() == exact.keys()
    worse = {}
    for name, value in exact.items():
        # Softmax does not depend on the biases of the keys, so their gradients are only rounding.
        if name.endswith("k_proj.bias"):
            continue
        our_error, plain_error = ((x[name] - value).norm() for x in (ours, plain))
        assert our_error.isfinite(), name
        if our_error > 2 * plain_error:
            worse[name] = f"{our_error:.3e} against {plain_error:.3e} of {value.norm():.3e}"
    assert not worse, worse


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


@DTYPES
@NORMS
def test_encoder_layer(dtype: torch.dtype, normalize_before: bool) -> None:
    layer = layers.EncoderLayer(
        C, F, H, **RATES, activation="gelu", normalize_before=normalize_before, site=8
    )

    def call(layer: nn.Module, x: Tensor) -> Results:
        return {"y": layer(x, segments(SOURCE, x.device), make_rng(x.device))}

    check(layer, (torch.randn(sum(SOURCE), C),), dtype, call)


@DTYPES
@NORMS
def test_decoder_layer(dtype: torch.dtype, normalize_before: bool) -> None:
    layer = layers.DecoderLayer(
        C, F, H, encoder_dim=64, **RATES, normalize_before=normalize_before, site=8
    )

    def call(layer: nn.Module, x: Tensor, memory: Tensor) -> Results:
        at = x.device
        return {"y": layer(x, memory, segments(TARGET, at), segments(SOURCE, at), make_rng(at))}

    inputs = (torch.randn(sum(TARGET), C), torch.randn(sum(SOURCE), 64))
    check(layer, inputs, dtype, call)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Source tokens, target tokens and labels; some labels are pads."""
    source, target, labels = (torch.randint(2, V, (sum(n),)) for n in (SOURCE, TARGET, TARGET))
    labels[::50] = PAD
    return source, target, labels


def run(model: nn.Module, *inputs: Tensor) -> Results:
    return model(*inputs)


@DTYPES
@pytest.mark.parametrize(
    ("normalize_before", "activation"), [(False, "gelu"), (True, "relu")], ids=["post", "pre"]
)
def test_model(dtype: torch.dtype, normalize_before: bool, activation: str) -> None:
    check(Model(normalize_before, activation), batch(), dtype, run)


@DTYPES
def test_same_input_same_bits(dtype: torch.dtype) -> None:
    model = seeded_weights(Model(True, "relu")).to("cuda", dtype)
    inputs = tuple(x.cuda() for x in batch())
    first, second = (results_of(copy.deepcopy(model), inputs, run) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# Out of memory

TERA = 1 << 40


@pytest.fixture
def allocator_says_no() -> Iterator[None]:
    """Makes the caching allocator itself refuse memory, without a failing cudaMalloc.

    compute-sanitizer would report the latter as an error of the program.
    """
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    yield


def dropout_of(rows: int, columns: int, device: str) -> Tensor:
    return ops.dropout_mask(make_rng(device), 1, rows, columns, 0.5)


def product_of(rows: int, columns: int, device: str) -> Tensor:
    x = torch.ones(rows, 8, dtype=torch.bfloat16, device=device)
    return ops.linear_fwd(x, torch.ones(columns, 8, dtype=x.dtype, device=device), None)


def lookup_of(rows: int, columns: int, device: str) -> Tensor:
    tokens = torch.zeros(rows, dtype=torch.int32, device=device)
    weight = torch.ones(1, columns, dtype=torch.bfloat16, device=device)
    dropout = ops.Dropout(0.5, make_rng(device), 1)
    return ops.embedding_fwd(tokens, weight, None, None, 2.0, dropout)[0]


@pytest.mark.parametrize("op", [dropout_of, product_of, lookup_of])
def test_out_of_memory_leaves_the_process_usable(
    op: Callable[[int, int, str], Tensor], allocator_says_no: None
) -> None:
    """The inputs are small, the output has 2^40 elements."""
    expected = op(24, 16, "cpu")
    before = torch.cuda.memory_allocated()
    with pytest.raises(RuntimeError, match="memory"):
        op(TERA >> 20, 1 << 20, "cuda")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(op(24, 16, "cuda").cpu(), expected)


@DTYPES
@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_an_empty_batch(dtype: torch.dtype, counts: list[int]) -> None:
    model = Model(True, "relu").to("cuda", dtype)
    sentences = Segments.from_lengths(torch.tensor(counts, dtype=torch.int64, device="cuda"))
    rng, none = make_rng("cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    x = model.table(none, sentences, rng, site=0)
    memory = layers.run_encoder(model.encoder, model.norms[0], x, sentences, rng)
    y = layers.run_decoder(model.decoder, model.norms[1], x, memory, sentences, sentences, rng)
    layers.linear(y, model.table.weight).float().sum().backward()
    assert y.shape == (0, C)
    torch.cuda.synchronize()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_layers_without_sites_drop_what_they_drop_on_a_cpu() -> None:
    tables = nn.ModuleList(layers.Embedding(V, C, PAD, dropout=0.5) for _ in range(2))
    for table in tables:
        nn.init.ones_(table.weight)
        nn.init.zeros_(table.position_weight)

    def dropped(device: str) -> list[Tensor]:
        tokens, rng = torch.arange(2, 66, device=device), make_rng(device)
        sentences = segments([40, 24], device)
        return [(table(tokens, sentences, rng) == 0).cpu() for table in tables.to(device)]

    on_cpu, on_gpu = dropped("cpu"), dropped("cuda")
    assert all(map(torch.equal, on_gpu, on_cpu))
    assert not torch.equal(*on_gpu)


def test_a_layer_alone_moves_to_the_gpu() -> None:
    layer = layers.EncoderLayer(C, F, H)
    values = [p.detach().clone() for p in layer.parameters()]
    layer.to("cuda", torch.float16)
    for parameter, value in zip(layer.parameters(), values, strict=True):
        assert parameter.is_cuda and torch.equal(parameter.cpu(), value.half())
    x = torch.randn(9, C, device="cuda", dtype=torch.float16)
    layer(x, segments([4, 5], "cuda"), make_rng("cuda")).float().sum().backward()
    assert all(p.grad is not None and p.grad.is_cuda for p in layer.parameters())
