"""Kernels whose shared memory grows with a size, at every size that they accept.

Without a request a block has 48 KiB, including static shared memory, so a kernel may fail only at a
few sizes. Results are only checked roughly here; the kernels' own tests check them precisely.
"""

from __future__ import annotations

import pytest
import torch
from helpers.decode_attention_cases import Past, Source, check
from helpers.ops_testing import make_rng
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops.linear_activation import read_slope

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def is_close(ours, expected, dtype):
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    return (ours.double() - expected.double()).abs().max() <= tolerance * (1 + expected.abs().max())


@DTYPES
def test_cross_entropy(dtype):
    """Vocabularies around 48 KiB per row, and around the largest row that stays in shared memory,
    in steps of one; up to more than a block can have."""
    of_gpu = torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor
    around, most = (48 << 10) // dtype.itemsize, (of_gpu // 2 - 1024) // dtype.itemsize
    by_one = (*range(around - 72, around + 9), *range(most - 200 // dtype.itemsize, most + 9))
    for classes in (*by_one, *range(8, 130_000, 4111)):
        logits = torch.randn(8, classes, device="cuda").to(dtype)
        target = torch.arange(8, device="cuda")
        expected = functional.cross_entropy(logits.double(), target, reduction="none")
        ones = torch.ones(8, device="cuda")
        for accuracy in (False, True):
            x = logits.clone()
            loss, _, _ = ops.cross_entropy_fwd_bwd(ones, x, target, 0.0, -1, accuracy)
            assert is_close(loss, expected, dtype), classes
            assert x.double().sum(1).abs().max() < 0.1, classes  # the gradient of a row sums to 0


@DTYPES
def test_layer_norm(dtype):
    rng = make_rng(device="cuda")
    for columns in (*range(8, 8193, 248), 1024, 2048, 4096, 6144, 8192):
        # More rows than the kernel of few rows takes, so that blocks queue up; and few.
        for rows in (3, 5000 if columns <= 1024 else 1200):
            x, residual = torch.randn(2, rows, columns, device="cuda").to(dtype)
            gamma, beta = torch.randn(2, columns, device="cuda").to(dtype)
            total, y, mean, rstd, *_ = ops.dropout_residual_layer_norm_fwd(
                x, None, residual, gamma, beta, ops.Dropout(0.0, rng, 0), 1e-5
            )
            expected = functional.layer_norm(
                (x + residual).double(), (columns,), gamma.double(), beta.double()
            )
            assert is_close(y, expected, dtype), columns
            summed = x.double().sum(0)
            for dsum in (x, None):
                gradients = [torch.full_like(gamma, torch.nan) for _ in range(3)]
                _, dresidual, _ = ops.dropout_residual_layer_norm_bwd(
                    x, dsum, total, gamma, mean, rstd, ops.Dropout(0.0, rng, 0), *gradients, False
                )
                assert is_close(gradients[1].float(), summed, dtype), columns
                assert dresidual.isfinite().all(), columns
            bias = torch.full_like(gamma, torch.nan)
            ops.dropout_residual_layer_norm_bwd(
                None, x, x, None, mean, rstd, ops.Dropout(0.0, rng, 0), None, None, bias, False
            )
            assert is_close(bias.float(), summed, dtype), columns


@DTYPES
def test_embedding_layer_norm(dtype):
    rng = make_rng(device="cuda")
    for columns in (*range(8, 8193, 248), 1024, 2048, 4096, 6144, 8192):
        for rows in (3, 5000 if columns <= 1024 else 1200):
            weight, (gamma, beta) = (
                torch.randn(n, columns, device="cuda").to(dtype) for n in (9, 2)
            )
            tokens, dropout = torch.arange(rows, device="cuda") % 9, ops.Dropout(0.0, rng, 0)
            y, mean, rstd, _ = ops.embedding_layer_norm_fwd(
                tokens, weight, None, None, gamma, beta, 1.0, dropout, eps=1e-5
            )
            x = weight[tokens]
            expected = functional.layer_norm(x.double(), (columns,), gamma.double(), beta.double())
            assert is_close(y, expected, dtype), columns
            gradients = [torch.full_like(gamma, torch.nan) for _ in range(2)]
            dx = ops.embedding_layer_norm_bwd(x, x, gamma, mean, rstd, dropout, *gradients, False)
            assert is_close(gradients[1].float(), x.double().sum(0), dtype), columns
            assert dx.isfinite().all(), columns


@DTYPES
def test_attention(dtype):
    cu = torch.tensor([0, 5, 70, 70, 300], dtype=torch.int32, device="cuda")
    rng = make_rng(device="cuda")
    for width in range(8, 129, 8):
        q, k, v, dout = torch.randn(4, 300, 2, width, device="cuda").to(dtype)
        rest = (cu, cu, 230, 230, True, 0, width**-0.5, ops.Dropout(0.0, rng, 0))
        out, lse, _ = ops.attention_fwd(q, k, v, *rest)
        first = [x[5:70].double().transpose(0, 1) for x in (q, k, v)]
        expected = functional.scaled_dot_product_attention(*first, is_causal=True).transpose(0, 1)
        assert is_close(out[5:70], expected, dtype), width
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        ops.attention_bwd(dout, q, k, v, out, lse, *rest, *gradients)
        assert all(x.isfinite().all() for x in gradients), width


@DTYPES
@pytest.mark.parametrize("width", [8, 64, 72, 128])
def test_decode_attention(width, dtype):
    for beam in (1, 4, 5, 8, 16, 33, 64):
        check(Past(3 * beam, 40, dtype, heads=2, width=width, beam=beam))
        check(Source([9, 70, 1], [2, 0, 1], beam, dtype, heads=2, width=width))


@DTYPES
def test_linear(dtype):
    """Row counts for every kernel of ours and of cuBLASLt."""
    for rows in (1, 4, 9, 16, 17, 64, 100, 128, 300):
        for k in (8, 72, 512, 1032, 2048, 4096, 8192):
            x = torch.randn(rows, k, device="cuda").to(dtype)
            weight = (torch.randn(136, k, device="cuda") * k**-0.5).to(dtype)
            y = ops.linear_fwd(x, weight, None)
            assert is_close(y, x.double() @ weight.double().t(), dtype), (rows, k)


@DTYPES
def test_linear_next_to_an_activation(dtype):
    """Row counts without tiles and with them."""
    for rows in (9, 300, 2500):
        for k in (8, 64, 72, 1032, 4096):
            x, dy = torch.randn(rows, k, device="cuda"), torch.randn(rows, k, device="cuda")
            x, dy, weight = x.to(dtype), dy.to(dtype), torch.randn(2056, k, device="cuda")
            weight, bias = (weight * k**-0.5).to(dtype), torch.zeros(2056, device="cuda").to(dtype)
            dropout = ops.Dropout(0.0, make_rng(device="cuda"), 0)
            y, _, slope = ops.linear_activation_fwd(x, weight, bias, "gelu", dropout, True)
            expected = functional.gelu(x.double() @ weight.double().t())
            assert is_close(y, expected, dtype), (rows, k)
            across = weight.t().contiguous()
            dz, _ = ops.activation_linear_bwd(dy, y, across, slope, 0.0, None, bias, False)
            expected = (dy.double() @ across.double()) * read_slope(slope).double()
            assert is_close(dz, expected, dtype), (rows, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_of_few_rows(dtype):
    """Numbers of outputs that give a block of that kernel one to four tiles, on any GPU."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    for tiles in (1, 2, 3, 4):
        outputs = (tiles * blocks - 1) * 8
        for k in (8, 512, 520, 768, 1024, 1536, 1544, 2048, 3072, 4096, 8192):
            weight = (torch.randn(outputs, k, device="cuda") * k**-0.5).to(dtype)
            for rows in (3, 16):
                x = torch.randn(rows, k, device="cuda").to(dtype)
                y = ops.linear_fwd(x, weight, None)
                assert is_close(y, x.double() @ weight.double().t(), dtype), (rows, k, outputs)


@DTYPES
def test_embedding(dtype):
    for vocabulary in (9, 4096, 40_000, 300_000):
        tokens = torch.randint(2, vocabulary, (5000,), device="cuda")
        dy = torch.randn(5000, 64, device="cuda").to(dtype)
        table = torch.full((vocabulary, 64), torch.nan, device="cuda")
        dropout = ops.Dropout(0.0, make_rng(device="cuda"), 0)
        ops.embedding_bwd(dy, tokens, None, 1.0, 1, dropout, table, None, False)
        expected = torch.zeros(vocabulary, 64, device="cuda", dtype=torch.float64)
        assert is_close(table, expected.index_add_(0, tokens, dy.double()), dtype), vocabulary
