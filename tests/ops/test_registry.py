"""Properties of every op: registered, deterministic, independent of the grad mode, the same on a
GPU."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from itertools import chain, combinations_with_replacement, repeat
from typing import Any

import pytest
import torch
from helpers.ops_testing import check_op, flat, make_rng, poisoned, skip_without_fp8
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.ops.checks import trust_boundaries
from lightseq_fairseq.ops.fp8_weights import Matrix, fp8_tiles
from lightseq_fairseq.ops.update_scalars import KNOWN_RATES, Given, State

T, C, V, H, P, SITE = 10, 8, 12, 2, 0.3, 5
CU = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
STEPS, LAST_STEPS = torch.tensor([[3], [5]], dtype=torch.int32).expand(2, T).contiguous()


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tokens(size: int) -> Tensor:
    """Indices, the first and the last row among them."""
    return torch.cat((torch.randint(0, size, (T - 2,)), torch.tensor([0, size - 1])))


def dropout() -> ops.Dropout:
    return ops.Dropout(P, make_rng(), SITE)


def attention() -> tuple[Any, ...]:
    return CU, CU, 5, 5, True, 0, 0.5, dropout()


def fp8(*shape: int) -> Tensor:
    return randn(*shape).to(torch.float8_e4m3fn)


def bf16(*shape: int) -> Tensor:
    return randn(*shape).bfloat16()


def scale() -> Tensor:
    return torch.tensor(2.0**-8)


def of_cast() -> ops.Cast:
    return ops.Cast(scale(), torch.tensor(1.5), torch.tensor(7))


def quantised(rows: int, columns: int, padded: int = 16) -> ops.Quantised:
    return ops.Quantised(fp8(rows, columns), fp8(columns, padded), scale())


def of_matrices() -> ops.WeightCast:
    tiles = fp8_tiles([Matrix(512, 0, 16, 32), Matrix(64, 512, 16, 16)], 2048)
    scales, noted = scale().expand(2).clone(), (torch.ones(2), torch.full((2,), 7))
    return ops.WeightCast(tiles, scales, *noted, fp8(768), fp8(768))


# Arguments for every op, with a state in which every branch of it has something to do; and with a
# cast for ops that may cast.
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "dropout_mask": lambda: (make_rng(), SITE, T, C, P),
    "embedding_fwd": lambda: (*(tokens(V), randn(V, C), tokens(T), randn(T, C), 2.0, dropout()),),
    "embedding_bwd": lambda: (
        *(randn(T, C), tokens(V), tokens(T), 2.0, 1, dropout()),
        *(randn(V, C), randn(T, C), True),
    ),
    "embedding_layer_norm_fwd": lambda: (
        *(tokens(V), randn(V, C), tokens(T), randn(T, C), randn(C), randn(C)),
        *(2.0, dropout(), 1e-5),
    ),
    "embedding_layer_norm_bwd": lambda: (
        *(randn(T, C), randn(T, C), randn(C), randn(T), randn(T).abs()),
        *(dropout(), randn(C), randn(C), True),
    ),
    "embedding_fwd cast": lambda: (
        *(tokens(V), bf16(V, 16), tokens(V), bf16(V, 16), 2.0, dropout(), of_cast()),
    ),
    "embedding_layer_norm_fwd cast": lambda: (
        *(tokens(V), bf16(V, 16), tokens(V), bf16(V, 16), bf16(16), bf16(16)),
        *(2.0, dropout(), 1e-5, of_cast()),
    ),
    "linear_fwd": lambda: (randn(T, C), randn(V, C), randn(V)),
    "linear_bwd": lambda: (
        *(randn(T, V), randn(T, C), randn(V, C), randn(V, C), randn(V), randn(T, C)),
        *(True, False),
    ),
    "linear_fwd cast": lambda: (quantised(T, 16), quantised(32, 16, 32), bf16(32)),
    "linear_bwd cast": lambda: (
        *(quantised(T, 32), quantised(T, 16), quantised(32, 16, 32)),
        *(randn(32, 16).float(), None, bf16(T, 16), True, False),
    ),
    "attention_fwd": lambda: (*(randn(T, H, C) for _ in range(3)), *attention()),
    "attention_bwd": lambda: (
        *(randn(T, H, C) for _ in range(5)),
        *(randn(T, H), *attention()),
        *(poisoned(T, H, C) for _ in range(3)),
    ),
    "attention_fwd cast": lambda: (*(bf16(T, H, 16) for _ in range(3)), *attention(), of_cast()),
    "attention_bwd cast": lambda: (
        *(bf16(T, H, 16) for _ in range(5)),
        *(randn(T, H).float(), *attention()),
        *(fp8(T, H * 16).view(T, H, 16) for _ in range(3)),
        *(of_cast(), of_cast()),
    ),
    "dropout_residual_layer_norm_fwd": lambda: (
        *(randn(T, C), randn(C), randn(T, C), randn(C), randn(C), dropout(), 1e-5),
    ),
    "dropout_residual_layer_norm_bwd": lambda: (
        *(randn(T, C), randn(T, C), randn(T, C), randn(C), randn(T), randn(T).abs()),
        *(dropout(), randn(C), randn(C), randn(C), True),
    ),
    "dropout_residual_layer_norm_fwd without norm": lambda: (
        *(randn(T, C), None, randn(T, C), None, None, dropout(), 1e-5),
    ),
    "dropout_residual_layer_norm_bwd without norm": lambda: (
        *(None, randn(T, C), randn(T, C), None, randn(0), randn(0), dropout()),
        *(None, None, randn(C), False),
    ),
    "dropout_residual_layer_norm_fwd cast": lambda: (
        *(bf16(T, 16), bf16(16), bf16(T, 16), bf16(16), bf16(16), dropout(), 1e-5),
        *(False, of_cast()),
    ),
    "dropout_residual_layer_norm_bwd cast": lambda: (
        *(bf16(T, 16), bf16(T, 16), bf16(T, 16), bf16(16), randn(T).float(), randn(T).float()),
        *(dropout(), bf16(16), bf16(16), bf16(16), True, of_cast()),
    ),
    "bias_activation_dropout_fwd": lambda: (randn(T, C), randn(C), "gelu", dropout()),
    "bias_activation_dropout_bwd": lambda: (
        *(randn(T, C), randn(T, C), randn(C), "gelu", dropout(), randn(C), True),
    ),
    "rotary_embedding": lambda: (
        *(randn(T, H, C), randn(T, C // 2).float(), randn(T, C // 2).float(), False),
    ),
    "gated_activation_fwd": lambda: (randn(T, 2 * C), "gelu", dropout()),
    "gated_activation_bwd": lambda: (randn(T, C), randn(T, 2 * C), "gelu", dropout()),
    "linear_activation_fwd": lambda: (
        *(randn(T, V), randn(C, V), randn(C), "gelu", dropout(), True),
    ),
    "linear_activation_fwd cast": lambda: (
        *(quantised(T, 16), quantised(32, 16, 32), bf16(32), "gelu", dropout(), True, of_cast()),
    ),
    "activation_linear_bwd": lambda: (
        *(randn(T, V), randn(T, C), randn(V, C), randn(T, C), P, randn(V, C), randn(C), True),
    ),
    "activation_linear_bwd cast": lambda: (
        *(quantised(T, 16), quantised(T, 32), quantised(16, 32), None, P),
        *(randn(16, 32).float(), randn(32).float(), True, None, of_cast()),
    ),
    "activation_linear_bwd slope and cast": lambda: (
        *(quantised(T, 16), quantised(T, 32), quantised(16, 32)),
        *(torch.randint(0, 255, (T, 32)).to(torch.uint8), P),
        *(randn(16, 32).float(), randn(32).float(), True, None, of_cast()),
    ),
    "fp8_quantise": lambda: (randn(T, 16).float(), of_cast(), randn(16).float(), True),
    "fp8_quantise no rows": lambda: (bf16(0, 16), of_cast()),
    "fp8_transpose": lambda: (bf16(T, 16), scale()),
    "fp8_transpose fp8": lambda: (fp8(T, 16), scale(), randn(16).float(), True),
    "fp8_scales": lambda: (
        *(torch.full((V,), 2.0**-8), randn(V).abs().float(), randn(16, V).abs().float()),
        *(torch.tensor(0.0, dtype=torch.float64), False),
    ),
    "fp8_weights": lambda: (bf16(2048), of_matrices()),
    "adam_step cast": lambda: (
        *(torch.randint(-(2**15), 2**15, (2048,)).short(), randn(2048).float()),
        *(randn(2048).abs().float(), bf16(2048), bf16(2048), torch.tensor(4)),
        *(torch.tensor(1e-3), torch.tensor(0.5), torch.tensor(3.0)),
        *(1.0, 1e-6, 0.9, 0.98, 1e-8, 0.1, of_matrices()),
    ),
    "cross_entropy_fwd": lambda: (randn(T, V), tokens(V), 0.1, 1, True),
    "cross_entropy_bwd": lambda: (randn(T), randn(T, V), tokens(V), randn(T).add(3), 0.1, 1),
    "cross_entropy_fwd_bwd": lambda: (randn(T), randn(T, V), tokens(V), 0.1, 1, True),
    "defer_column_sums": lambda: (randn(V),),
    "flush_column_sums": lambda: (randn(V), True),
    "decode_self_attention": lambda: (
        *(randn(4, 48), randn(6, 5, 16), randn(6, 5, 16), torch.randint(0, 5, (6, 5)).int()),
        *(torch.tensor([3, 1, 0, 3]).int(), 2, 0.4),
    ),
    "decode_cross_attention": lambda: (
        *(randn(T, 16), randn(8, 16), randn(8, 16), CU, torch.tensor([2, -1, 0]).int(), 3, 2, 0.4),
    ),
    "block_repeats": lambda: (
        *(randn(T, V), randn(T).float(), torch.tensor([4, 2]).int(), tokens(V).int(), STEPS),
        *(torch.randint(0, T, (6, T)).int(), torch.randint(0, V, (6, T)).int(), 2, 1.5, False),
    ),
    "beam_candidates": lambda: (
        *(randn(T, V), randn(T).float(), STEPS, LAST_STEPS, 4, 1, 2, 3, 1, 0, 0.5, 1.5),
    ),
    "beam_sample": lambda: (
        *(randn(T, V), randn(T).float(), torch.arange(T // 2).int(), STEPS, LAST_STEPS),
        *(make_rng(), 2, 5, 0.0, 1, 2, 3, 1, 0, 0.5, 1.5),
    ),
    "beam_advance": lambda: (
        *(randn(T, 4).float().sort(1, True)[0], torch.randint(2, 5, (T, 4)).int()),
        *(LAST_STEPS, torch.zeros(2).int(), torch.tensor([1, -1, 0, 3, 2]).int(), STEPS.clone()),
        *(STEPS.clone(), tokens(V).int()),
        *(randn(T).float(), torch.randint(0, T, (6, T)).int(), torch.randint(0, V, (6, T)).int()),
        *(randn(6, T).float(), torch.zeros(T, 6).int(), randn(T, 6).float()),
        *(torch.zeros(T).int(), randn(T).float(), torch.zeros(6).int()),
        *(2, 2, 0.5, 2, 0.6, 0),
    ),
    "update_scalars": lambda: (
        *(torch.arange(len(State)).ne(State.STOPPED).double(), make_rng()),
        *(randn(len(Given) + KNOWN_RATES - 1).abs(), torch.tensor(3.0)),
        *(7, 2, 0.1, 0.0, 1e-4),
    ),
    "adam_norm": lambda: (randn(1000),),
    "adam_step": lambda: (
        *(randn(T), randn(T), randn(T).abs(), randn(T), randn(T).half(), torch.tensor(4)),
        *(torch.tensor(1e-3), torch.tensor(0.5), torch.tensor(3.0)),
        *(1.0, 1e-6, 0.9, 0.98, 1e-8, 0.1),
    ),
}


# The argument that stays on the host, in pinned memory.
OF_THE_HOST = {"beam_advance": 16}


def arguments_of(name: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return ARGUMENTS[name]()


def op_of(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(ops, name.split()[0])
    return function


def results(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The results of the op, and its arguments afterwards, because it writes to some of them."""
    return tensors(op_of(name)(*arguments), flat(arguments))


def tensors(outputs: Any, arguments: list[Any]) -> list[Tensor]:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return [x for x in (*found, *arguments) if isinstance(x, Tensor)]


def in_float32(name: str, arguments: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Kernels do not support float64, except for the scalars of a step and attention's lse."""
    all_places = range(len(arguments))
    in_float64 = {"update_scalars": all_places, "attention_bwd": (5,), "fp8_scales": (3,)}.get(
        name.split()[0], ()
    )

    def moved(place: int, x: Any) -> Any:
        if isinstance(x, tuple):
            return type(x)(*(moved(place, y) for y in x))
        if not isinstance(x, Tensor):
            return x
        if place == OF_THE_HOST.get(name):
            return x.pin_memory() if device == "cuda" else x
        is_float32 = x.dtype == torch.float64 and place not in in_float64
        there = x.to(device, torch.float32 if is_float32 else x.dtype)
        # Boundaries from unknown code are read once, which waits: see
        # tests/ops/test_attention_cuda.py.
        return trust_boundaries(there, 8, 5) if x is CU else there

    return tuple(moved(*each) for each in enumerate(arguments))


def of_schema(name: str, arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments as torch's op takes them: those of a group in its place, and a Tensor in the
    place of a group as the first of these."""
    given = inspect.signature(op_of(name)).bind(*arguments)
    given.apply_defaults()
    values = {
        parameter: iter(x) if isinstance(x, tuple) else chain([x], repeat(None))
        for parameter, x in given.arguments.items()
    }
    names = [x.name for x in getattr(torch.ops.lightseq, name.split()[0]).default._schema.arguments]
    return [next(values[x if x in values else x.rpartition("_")[0]]) for x in names]


def test_every_op_is_covered_and_exported():
    names = {name.split()[0] for name in ARGUMENTS}
    assert names == set(ops.REFERENCES)
    assert all(hasattr(ops, name) for name in names)


@pytest.mark.parametrize(
    "schema",
    [
        "activation_linear_bwd(Tensor? dy_values, Tensor? dy_transpose, Tensor? dy_scale,"
        " Tensor? x_values, Tensor? x_transpose, Tensor? x_scale,"
        " Tensor? weight_values, Tensor? weight_transpose, Tensor? weight_scale,"
        " Tensor? slope, float p, Tensor(a!)? dweight, Tensor(b!)? dbias, bool accumulate,"
        " Tensor? bias=None, Tensor? cast_scale=None, Tensor(c!)? cast_amax=None,"
        " Tensor(d!)? cast_saturated=None) -> (Tensor dz, Tensor transpose)",
        "cross_entropy_fwd_bwd(Tensor dloss, Tensor(a!) logits, Tensor target, float smoothing,"
        " int padding_idx, bool accuracy) -> (Tensor loss, Tensor nll, Tensor correct)",
        "decode_self_attention(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor ancestry,"
        " Tensor steps, int heads, float scale, int beam=1) -> Tensor",
        "bias_activation_dropout_fwd(Tensor x, Tensor? bias, str activation, float dropout_p,"
        " Tensor dropout_rng, int dropout_site) -> Tensor",
        "embedding_fwd(Tensor tokens, Tensor weight, Tensor? positions, Tensor? position_weight,"
        " float scale, float dropout_p, Tensor dropout_rng, int dropout_site,"
        " Tensor? cast_scale=None, Tensor(a!)? cast_amax=None, Tensor(b!)? cast_saturated=None)"
        " -> (Tensor y, Tensor values)",
        "defer_column_sums(Tensor flat) -> ()",
    ],
)
def test_schemas_follow_from_the_definitions(schema):
    """Kernels are compiled for these schemas, so rewriting an op's definition must not change
    them."""
    op = getattr(torch.ops.lightseq, schema.partition("(")[0])
    assert str(op.default._schema) == f"lightseq::{schema}"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_public_functions_take_what_the_schemas_name(name):
    function = op_of(name)
    schema = getattr(torch.ops.lightseq, function.__name__).default._schema
    parameters = set(inspect.signature(function).parameters)
    # An argument of a group has the name of the group before its own.
    of_schema = {
        x.name if x.name in parameters else x.name.rpartition("_")[0] for x in schema.arguments
    }
    assert of_schema == parameters
    assert function.__name__ == name.split()[0] and function.__doc__
    with pytest.raises(TypeError, match="nonsense"):
        function(*arguments_of(name), nonsense=1)


@pytest.mark.parametrize(
    "name", [name for name in ARGUMENTS if any(isinstance(x, tuple) for x in ARGUMENTS[name]())]
)
def test_ops_take_the_arguments_of_a_group_in_its_place(name):
    given = arguments_of(name)
    expected = tensors(op_of(name)(*given), of_schema(name, given))
    arguments = of_schema(name, arguments_of(name))
    ours = tensors(getattr(torch.ops.lightseq, name.split()[0])(*arguments), arguments)
    assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))


def variants(name: str) -> Iterator[tuple[Any, ...]]:
    """The arguments, and those with changes that the op may refuse: one of them is another, or one
    or two of them are missing."""
    arguments = arguments_of(name)
    yield arguments
    for place, x in enumerate(arguments):
        others: list[Any] = [not x] if isinstance(x, bool) else []
        if isinstance(x, str):
            others = ["identity", "relu", "gelu_accurate", "silu"]
        elif isinstance(x, float):
            others = [0.0]
        elif isinstance(x, ops.Dropout):
            others = [x._replace(p=0.0)]
        for other in others:
            yield *arguments[:place], other, *arguments[place + 1 :]
    parameters = inspect.signature(op_of(name)).parameters.values()
    optional = [
        i for i, (_, x) in enumerate(zip(arguments, parameters)) if "None" in str(x.annotation)
    ]
    for gone in combinations_with_replacement(optional, 2):
        yield tuple(None if i in gone else x for i, x in enumerate(arguments))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_schema_and_shape_function_are_the_ops(name):
    for number, arguments in enumerate(variants(name)):
        try:
            op_of(name)(*copy.deepcopy(arguments))
        except ValueError:
            assert number > 0
        else:
            check_op(name.split()[0], *of_schema(name, arguments))


def is_fp8(name: str) -> bool:
    return name.startswith("fp8") or name.endswith("cast")


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(filter(is_fp8, ARGUMENTS)))
def test_shape_functions_of_casts_on_a_gpu(name):
    skip_without_fp8()
    given = in_float32(name, arguments_of(name), "cuda")
    check_op(name.split()[0], *of_schema(name, given))


@pytest.mark.gpu
def test_every_op_has_a_kernel():
    assert not library.load().references


@pytest.mark.parametrize("asked", ["", "1"])
@pytest.mark.parametrize(
    "name",
    [
        *("embedding_fwd", "cross_entropy_fwd", "attention_fwd", "decode_self_attention"),
        *("decode_cross_attention", "fp8_quantise"),
    ],
)
def test_checks_of_values_let_tensors_without_values_pass(name, asked, monkeypatch):
    """So that shape functions can be called."""
    monkeypatch.setenv("LIGHTSEQ_CHECK_INDICES", asked)
    expected = results(name, arguments_of(name))
    with FakeTensorMode() as mode:
        fake = results(name, tree_map_only(Tensor, mode.from_tensor, arguments_of(name)))
    meta = results(name, tree_map_only(Tensor, lambda x: x.to("meta"), arguments_of(name)))
    assert [x.shape for x in fake] == [x.shape for x in meta] == [x.shape for x in expected]

    def call(*arguments):
        return tensors(op_of(name)(*arguments), [])

    ours = torch.compile(call, backend="eager", fullgraph=True)(*arguments_of(name))
    torch.compiler.reset()
    assert ours and all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_deterministic(name):
    first, second = (results(name, arguments_of(name)) for _ in range(2))
    assert first
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_inference_mode_changes_nothing(name):
    expected = results(name, arguments_of(name))
    with torch.inference_mode():
        ours = results(name, arguments_of(name))
    assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if "_fwd" in name])
def test_inputs_that_require_gradients(name):
    """As if a model were called outside of no_grad. References write in place, which autograd would
    refuse."""
    expected = results(name, arguments_of(name))
    leaves = tuple(
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in arguments_of(name)
    )
    ours = results(name, leaves)
    assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARGUMENTS)
def test_gpu_equals_cpu_without_synchronising(name):
    """Every kernel computes what its reference does, and the host never waits for it."""
    if is_fp8(name):
        skip_without_fp8()
    expected = results(name, in_float32(name, arguments_of(name), "cpu"))
    arguments = in_float32(name, arguments_of(name), "cuda")
    # The first call may load things that later calls use.
    results(name, in_float32(name, arguments_of(name), "cuda"))
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = results(name, arguments)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for mine, other in zip(ours, expected, strict=True):
        assert mine.is_cuda or mine.is_pinned()
        assert mine.dtype == other.dtype
        # Each kernel's own tests check its precision. Ops of fp8 have bfloat16 inputs.
        bound = 1e-4
        if name.startswith("fp8") or name.endswith("cast"):
            is_rounded = mine.is_floating_point() and mine.itemsize < 4
            bound = torch.finfo(mine.dtype if is_rounded else torch.bfloat16).eps
        if mine.dtype == torch.uint8:  # codes of the slope
            bound = 1
        if mine.itemsize == 1 and mine.is_floating_point():
            mine, other = mine.float(), other.float()  # assert_close knows no bounds in 8 bits
        torch.testing.assert_close(mine.cpu(), other, rtol=bound, atol=bound)
