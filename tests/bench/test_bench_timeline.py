"""Parts of a step, and the overlap of collectives, from the events of a profile."""

from __future__ import annotations

from typing import Any

import pytest

from lightseq_fairseq.cli.profiling.timeline import class_of, overlap, timeline


def event(category: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def mark(start: float) -> dict[str, Any]:
    return event("kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)", start, 2)


def test_timeline() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        event("kernel", "nvjet_hsh_128x256", 10, 500),  # before the measured steps
        mark(1000),
        event("kernel", "nvjet_hsh_128x256", 1100, 200),
        event("kernel", "void attention_fwd_kernel<64>", 1200, 200),  # half of it overlaps the GEMM
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1000, 900),
        event("cuda_runtime", "cudaGraphLaunch", 1000, 900),
        mark(2000),
        event("kernel", "cross_entropy_fwd_kernel", 2000, 100),
        event("gpu_memset", "Memset (Device)", 2100, 100),
        event("kernel", "adam_step_kernel", 2900, 300),  # ends in the next step
        mark(3000),
    ]
    found = timeline(events)
    assert found.ms_per_step == 1.0
    assert found.class_ms == pytest.approx(
        {
            "contraction": 0.1, "attention": 0.05, "cross entropy": 0.05, "copies": 0.05,
            "optimizer": 0.05, "communication": 0, "embedding": 0, "normalisation": 0,
            "elementwise": 0, "gaps": 0.7,
        }
    )  # fmt: skip
    assert found.launches["contraction"] == found.launches["optimizer"] == 0.5
    assert found.busy == pytest.approx(0.3)
    with pytest.raises(ValueError, match="1 marks, 2 are needed"):
        timeline(events[:4])


def test_overlap() -> None:
    nccl = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)"
    events = [
        event("kernel", nccl, 900, 200),  # half of it before the first mark
        mark(1000),
        event("kernel", "nvjet_hsh_128x256", 1050, 100),
        mark(2000),
        event("kernel", "nvjet_hsh_128x256", 2100, 300),
        event("kernel", "adam_step_kernel", 2410, 90),  # so near that they are one span
        event("kernel", nccl, 2300, 200),
        event("kernel", nccl, 2400, 300),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 2900, 50),
        mark(3000),
        event("kernel", nccl, 3000, 500),
        mark(4000),
    ]
    found = overlap(events)
    # Collectives run for 100, 400 and 500; computation beside them for 50, 100 and 90.
    assert found.hidden == pytest.approx(240 / 1000)
    assert found.lanes_ms == {"computation": [(0.1, 0.5)], "collectives": [(0.3, 0.7)]}
    alone = overlap([e for e in events if e["name"] != nccl])
    assert alone.hidden is None and alone.lanes_ms["collectives"] == []
    with pytest.raises(ValueError, match="1 marks, 2 are needed"):
        overlap(events[:3])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_bias_TNT", "contraction"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>",
         "contraction"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "contraction"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)", "communication"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 5, false>", "attention"),
        ("cunn_SoftMaxForward<8, float, LogSoftMaxForwardEpilogue>", "cross entropy"),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", "cross entropy"),
        ("void lightseq::cross_entropy_bwd_kernel<__nv_bfloat16>", "cross entropy"),
        ("void lightseq::(anonymous namespace)::linear_tiles_kernel<__half>", "contraction"),
        ("void lightseq::(anonymous namespace)::linear_dbias_kernel<__half>", "elementwise"),
        ("void lightseq::(anonymous namespace)::activation_linear_bwd_kernel<__half>",
         "contraction"),
        ("void lightseq::(anonymous namespace)::linear_activation_fwd_kernel<__half>",
         "contraction"),
        ("void lightseq::adam::(anonymous namespace)::adam_norm_kernel<__nv_bfloat16>",
         "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void lightseq::(anonymous namespace)::fp8_weights_kernel<lightseq::(anonymous "
         "namespace)::Updated>", "optimizer"),
        ("lightseq::(anonymous namespace)::fp8_scales_kernel", "optimizer"),
        ("void lightseq::cast_kernel<lightseq::Given<__nv_bfloat16>>", "elementwise"),
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", "contraction"),
        ("void lightseq::dropout_residual_layer_norm_bwd_kernel<__half>", "normalisation"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>",
         "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
         "copies"),
        ("void lightseq::(anonymous namespace)::embedding_fwd_kernel<__half>", "embedding"),
        ("void at::native::vectorized_layer_norm_kernel<float, float>", "normalisation"),
        ("lightseq::linear_bwd", "contraction"),
        ("aten::addmm", "contraction"),
        ("aten::bmm", "attention"),
    ],
)  # fmt: skip
def test_classes(name: str, kind: str) -> None:
    assert class_of(name) == kind
