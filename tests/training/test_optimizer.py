from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightseq_fairseq.base.errors import UserError

import lightseq_fairseq.plugins  # isort: skip  (prepares fairseq and registers)

from fairseq import optim, utils
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf

from lightseq_fairseq.fairseq_compat.overlay import Overlay
from lightseq_fairseq.memory.parameters import flatten_parameters
from lightseq_fairseq.step.flat_adam import FlatAdam

SHAPES = ((7, 5), (3,), (64,), (9, 33), (1,), (4, 4))


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in SHAPES
    ]


def config(name: str, **options: Any) -> Any:
    """fairseq's configuration of a run with this optimizer; ``common`` are settings of its common
    section."""
    cfg = OmegaConf.structured(FairseqConfig)
    adam = {"_name": name, "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.1}
    adam.update(lr=[1e-3], fp16_adam_stats=False, use_old_adam=False, tpu=False)
    common = {key: options.pop(key) for key in list(options) if "16" in key and key not in adam}
    cfg.optimizer = OmegaConf.create({**adam, **options})
    cfg.common.update(common)
    cfg.common.fp16_scale_window = 100
    cfg.common.fp16_init_scale = 8
    return cfg


def build(name: str, params: list[nn.Parameter], **options: Any) -> Any:
    return optim.build_optimizer(config(name, **options).optimizer, params)


def set_gradients(
    step: int, *models: list[nn.Parameter], missing: tuple[int, ...] = (),
    by: tuple[Any, ...] = (),
) -> None:  # fmt: skip
    """Sets the same random gradients for all models, accumulated over two backward passes.

    ``by``: the optimizers whose ``backward`` to use, if the loss must be scaled.
    """
    for place, model in enumerate(models):
        generator = torch.Generator().manual_seed(step)
        for _ in range(2):
            noise = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model]
            terms = [
                (p * g.to(p.dtype)).sum()
                for i, (p, g) in enumerate(zip(model, noise, strict=True))
                if i not in missing
            ]
            loss = torch.stack(terms).sum()
            by[place].backward(loss) if by else loss.backward()


def in_float64() -> Any:
    """fairseq's clip_grad_norm_ without its cast to float32."""
    return mock.patch.object(utils, "torch", Overlay(torch, float32=torch.float64))


def train_side_by_side(
    native: Any, ours: Any, models: tuple[list[nn.Parameter], list[nn.Parameter]], steps: int = 50,
    missing: Any = lambda step: (), max_norm: float = 1.0,
) -> list[tuple[float, float]]:  # fmt: skip
    """Returns the gradient norms that both optimizers report."""
    norms = []
    for step in range(steps):
        pair = []
        for optimizer in (native, ours):
            optimizer.zero_grad()
        set_gradients(step, *models, missing=missing(step), by=(native, ours))
        for optimizer in (native, ours):
            optimizer.set_lr(1e-3 * (1 + step % 5))
            optimizer.multiply_grads(1 / (3 + step))
            pair.append(float(optimizer.clip_grad_norm(max_norm)))
            optimizer.step()
        norms.append((pair[0], pair[1]))
    return norms


def assert_close(
    ours: list[nn.Parameter], native: list[nn.Parameter], tolerance: float = 1e-12
) -> None:
    for a, b in zip(ours, native, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=0)


def assert_same_state(ours: dict[str, Any], native: dict[str, Any], tolerance: float) -> None:
    assert ours["param_groups"] == native["param_groups"]
    assert ours["state"].keys() == native["state"].keys()
    for key, expected in native["state"].items():
        found = ours["state"][key]
        assert found.keys() == expected.keys()
        assert type(found["step"]) is int
        assert found["step"] == expected["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert found[name].dtype == expected[name].dtype
            torch.testing.assert_close(
                found[name], expected[name], rtol=tolerance, atol=tolerance * 1e-3
            )


def clipped_twice(optimizer: Any) -> Tensor:
    """Later factors and clips apply to gradients that are already clipped."""
    optimizer.clip_grad_norm(2.0)
    optimizer.multiply_grads(torch.tensor(0.25, dtype=torch.float64))
    norm: Tensor = optimizer.clip_grad_norm(0.3)
    return norm


def aggregated(optimizer: Any) -> Tensor:
    optimizer.multiply_grads(0.5)
    norm: Tensor = optimizer.clip_grad_norm(1.0, lambda norm: norm * 7)
    return norm


class TestParityInFloat64:
    def test_fifty_steps(self) -> None:
        models = parameters(), parameters()
        native, ours = build("adam", models[0]), build("ls_adam", models[1])
        with in_float64():
            norms = train_side_by_side(native, ours, models)
        assert_close(models[1], models[0])
        assert_same_state(ours.state_dict(), native.state_dict(), 1e-12)
        for expected, found in norms:
            assert abs(expected - found) <= 1e-12 * expected
        assert sum(norm > 1 for norm, _ in norms) > 10  # clipped
        assert sum(norm < 1 for norm, _ in norms) > 10  # not clipped

    def test_parameters_without_gradient(self) -> None:
        """Some parameters never have a gradient, some only now and then, in the middle and at the
        ends."""

        def missing(step: int) -> tuple[int, ...]:
            return (2, *(place for place in (0, 3, 5) if (step + place) % 4 == 0))

        models = parameters(), parameters()
        untouched = models[1][2].detach().clone()
        native, ours = build("adam", models[0]), build("ls_adam", models[1])
        with in_float64():
            train_side_by_side(native, ours, models, missing=missing)
        assert_close(models[1], models[0])
        assert torch.equal(models[1][2], untouched)
        assert_same_state(ours.state_dict(), native.state_dict(), 1e-12)
        steps = {state["step"] for state in ours.state_dict()["state"].values()}
        assert steps == {50, 37, 38}

    @pytest.mark.parametrize("clip", [clipped_twice, aggregated])
    def test_clips(self, clip: Callable[[Any], Tensor]) -> None:
        models = parameters(), parameters()
        optimizers = build("adam", models[0]), build("ls_adam", models[1])
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            set_gradients(step, *models)
            with in_float64():
                norms = [clip(optimizer) for optimizer in optimizers]
                for optimizer in optimizers:
                    optimizer.step()
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-12, atol=0)
        assert_close(models[1], models[0])

    def test_experts_are_left_out_of_the_norm(self) -> None:
        models = parameters(), parameters()
        for model in models:
            model[3].expert = True
        native, ours = build("adam", models[0]), build("ls_adam", models[1])
        with in_float64():
            norms = train_side_by_side(native, ours, models, steps=5)
        assert_close(models[1], models[0])
        assert all(abs(a - b) <= 1e-12 * a for a, b in norms)

    def test_groups(self) -> None:
        models = parameters(), parameters()
        flatten_parameters(nn.ParameterList(models[1]))
        groups = [
            [
                {"params": model[::2], "lr": 1e-2, "weight_decay": 0.3},
                {"params": model[1::2], "betas": (0.5, 0.7), "eps": 1e-3},
            ]
            for model in models
        ]
        native = optim.adam.Adam(groups[0])
        ours = FlatAdam(groups[1][:1])
        ours.add_param_group(groups[1][1])
        for step in range(10):
            native.zero_grad()
            ours.zero_grad()
            set_gradients(step, *models)
            native.step()
            ours.step()
        assert_close(models[1], models[0])
        assert_same_state(ours.state_dict(), native.state_dict(), 1e-12)

    def test_a_model_moved_between_steps(self) -> None:
        models = parameters(), parameters()
        native, ours = build("adam", models[0]), build("ls_adam", models[1])
        with in_float64():
            train_side_by_side(native, ours, models, steps=3)
            for parameter in models[1]:
                parameter.data = parameter.data.clone()
            train_side_by_side(native, ours, models, steps=3)
        assert_close(models[1], models[0])


class TestGradients:
    def test_stay_visible_and_are_forgotten(self) -> None:
        model = parameters()
        ours = build("ls_adam", model)
        set_gradients(0, model)
        before = [p.grad.clone() for p in model]
        norm = ours.clip_grad_norm(0)
        for parameter, gradient in zip(model, before, strict=True):
            assert torch.equal(parameter.grad, gradient)
        torch.testing.assert_close(norm, torch.cat([g.flatten() for g in before]).norm())
        ours.multiply_grads(3)
        ours.zero_grad()
        assert all(p.grad is None for p in model)
        set_gradients(0, model)
        assert torch.equal(ours.clip_grad_norm(0), norm)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_not_finite(self, bad: float) -> None:
        model = parameters(torch.float32)
        ours = build("ls_adam", model)
        set_gradients(0, model)
        ours.step()
        ours.zero_grad()
        before, state = copy.deepcopy(model), copy.deepcopy(ours.state_dict())
        set_gradients(1, model)
        model[3].grad[2, 2] = bad
        assert not ours.clip_grad_norm(1.0).isfinite()
        ours.step()
        assert_close(model, before, 0)
        assert_same_state(ours.state_dict(), state, 0)

    def test_closure(self) -> None:
        model = parameters()
        ours = build("ls_adam", model)

        def closure() -> Tensor:
            loss = sum((p**2).sum() for p in model)
            loss.backward()
            return loss

        before = model[0].detach().clone()
        assert ours.optimizer.step(closure) > 0
        assert not torch.equal(model[0], before)


def flat_fp16_on_cpu() -> Any:
    """fairseq asks CUDA for the device of its flat vector; None stands for the CPU."""
    return mock.patch.object(torch.cuda, "current_device", lambda: None)


WRAPPED = {
    "fp16, flat": (torch.float16, "FP16Optimizer", {"fp16": True}),
    "fp16, list": (
        torch.float16, "FP16Optimizer", {"fp16": True, "fp16_no_flatten_grads": True},
    ),
    "bf16": (torch.bfloat16, "FP16Optimizer", {"bf16": True}),
    "memory-efficient fp16": (
        torch.float16, "MemoryEfficientFP16Optimizer",
        {"fp16": True, "memory_efficient_fp16": True},
    ),
    "memory-efficient bf16": (
        torch.bfloat16, "MemoryEfficientFP16Optimizer",
        {"bf16": True, "memory_efficient_bf16": True},
    ),
}  # fmt: skip


def wrapped(
    name: str, model: list[nn.Parameter], case: tuple[torch.dtype, str, dict[str, Any]]
) -> Any:
    _, wrapper, options = case
    with flat_fp16_on_cpu():
        return getattr(optim, wrapper).build_optimizer(config(name, **options), model)


@pytest.mark.parametrize("case", WRAPPED.values(), ids=WRAPPED)
class TestInsideFairseqsWrappers:
    def test_parity(self, case: tuple[torch.dtype, str, dict[str, Any]]) -> None:
        dtype, wrapper, _ = case
        models = parameters(dtype), parameters(dtype)
        native, ours = wrapped("adam", models[0], case), wrapped("ls_adam", models[1], case)
        norms = train_side_by_side(native, ours, models, steps=20, max_norm=2.5)
        for expected, found in norms:
            assert abs(expected - found) <= 1e-6 * expected
        assert 5 < sum(norm > 2.5 for norm, _ in norms) < 20
        eps = torch.finfo(dtype).eps
        if wrapper == "FP16Optimizer":
            assert_same_state(ours.state_dict(), native.state_dict(), 1e-4)
            for a, b in zip(masters(ours), masters(native), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        # One unit of rounding, where the float32 results lie on both sides of a rounding boundary.
        # Without float32 parameters, native rounds its gradients once more; ours does not.
        atol = 1e-6 if wrapper == "FP16Optimizer" else 20 * 5e-3 * eps
        for a, b in zip(*models, strict=True):
            torch.testing.assert_close(a, b, rtol=eps, atol=atol)
        assert {s["exp_avg"].dtype for s in ours.state_dict()["state"].values()} == {torch.float32}

    def test_each_loads_the_other(self, case: tuple[torch.dtype, str, dict[str, Any]]) -> None:
        """After loading either's state, native and ours continue as native does from its own
        state."""
        models = [parameters(case[0]) for _ in range(3)]
        native, ours, third = (
            wrapped(name, model, case)
            for name, model in zip(("adam", "ls_adam", "adam"), models, strict=True)
        )
        train_side_by_side(native, third, (models[0], models[2]), steps=4)
        for source, target, to in ((native, ours, models[1]), (ours, third, models[2])):
            target.load_state_dict(copy.deepcopy(source.state_dict()), {"lr": 0.5})
            assert target.get_lr() == 0.5
            for a, b in zip(to, models[0], strict=True):
                a.data.copy_(b)
            if case[1] == "FP16Optimizer":
                for a, b in zip(masters(target), masters(source), strict=True):
                    a.copy_(b)
        assert_same_state(third.state_dict(), native.state_dict() | lr_of(third), 0)
        train_side_by_side(native, ours, (models[0], models[1]), steps=4)
        eps = torch.finfo(case[0]).eps
        for a, b in zip(*models[:2], strict=True):
            torch.testing.assert_close(a, b, rtol=eps, atol=4 * 5e-3 * eps)


def lr_of(optimizer: Any) -> dict[str, Any]:
    return {"param_groups": optimizer.state_dict()["param_groups"]}


def masters(optimizer: Any) -> list[Tensor]:
    held = optimizer.fp32_params
    return [p.data for p in (held.values() if isinstance(held, dict) else held)]


class TestStates:
    def trained(self) -> tuple[Any, dict[str, Any]]:
        model = parameters(torch.float32)
        native = build("adam", model)
        for step in range(3):
            native.zero_grad()
            set_gradients(step, model)
            native.step()
        return native, copy.deepcopy(native.state_dict())

    def test_empty_before_the_first_step(self) -> None:
        model = parameters()
        ours = build("ls_adam", model)
        assert ours.state_dict()["state"] == {}
        ours.load_state_dict(build("adam", model).state_dict())
        assert ours.state_dict()["state"] == {}

    def test_one_vector_is_cut_up_and_joined(self) -> None:
        _, state = self.trained()
        flat_state = {
            "state": {
                0: {
                    "step": 3,
                    **{
                        name: torch.cat([s[name].flatten() for s in state["state"].values()])
                        for name in ("exp_avg", "exp_avg_sq")
                    },
                }
            },
            "param_groups": [{**state["param_groups"][0], "params": [0]}],
        }
        ours = build("ls_adam", parameters(torch.float32))
        ours.load_state_dict(flat_state)
        assert_same_state(ours.state_dict(), state, 0)
        vector = [nn.Parameter(torch.zeros(sum(p.numel() for p in parameters())))]
        ours = build("ls_adam", vector)
        ours.load_state_dict(state)
        assert_same_state(ours.state_dict(), flat_state, 0)

    def test_of_apex(self) -> None:
        """apex's fused Adam stores the step count in the group, and can scale moments to 16
        bits."""
        _, state = self.trained()
        fused = copy.deepcopy(state)
        fused["param_groups"][0].update(step=3, bias_correction=True)
        for entry in fused["state"].values():
            del entry["step"]
            entry["exp_avg_scale"] = torch.tensor(0.5)
            entry["exp_avg"] = entry["exp_avg"] * 2
        model = parameters(torch.float32)
        ours = build("ls_adam", model)
        ours.load_state_dict(fused)
        found = ours.state_dict()
        assert found["param_groups"][0]["step"] == 3
        found["param_groups"] = state["param_groups"]
        assert_same_state(found, state, 0)
        set_gradients(9, model)
        ours.step()
        assert ours.state_dict()["param_groups"][0]["step"] == 4

    def test_of_another_model(self) -> None:
        _, state = self.trained()
        ours = build("ls_adam", parameters(torch.float32)[:4])
        with pytest.raises(UserError, match="--reset-optimizer"):
            ours.load_state_dict(state)
        assert ours.state_dict()["state"] == {}

    def test_shares_nothing_with_what_was_loaded(self) -> None:
        _, state = self.trained()
        before = copy.deepcopy(state)
        model = parameters(torch.float32)
        ours = build("ls_adam", model)
        ours.load_state_dict(state)
        set_gradients(9, model)
        ours.step()
        assert_same_state(state, before, 0)


class TestAsAPlugin:
    def test_flags_are_those_of_adam(self) -> None:
        ours, native = build("ls_adam", parameters()), build("adam", parameters())
        assert type(ours).__name__ == type(native).__name__
        assert ours.optimizer_config == native.optimizer_config
        assert ours.supports_flat_params
        assert ours.supports_memory_efficient_fp16
        assert build("ls_adam", parameters(), lr=[0.25, 0.5]).get_lr() == 0.25

    @pytest.mark.parametrize("flag", ["fp16_adam_stats", "use_old_adam", "tpu"])
    def test_refused_flags(self, flag: str) -> None:
        with pytest.raises(UserError, match="--" + flag.replace("_", "-")):
            build("ls_adam", parameters(), **{flag: True})

    def test_registers_once_under_both_names(self) -> None:
        """``--user-dir`` imports the folder as ``plugins``, our launchers import it by its full
        name."""
        script = (
            "from argparse import Namespace; from lightseq_fairseq import fairseq_compat\n"
            "fairseq_compat.prepare(); from fairseq import optim, utils\n"
            f"utils.import_user_module(Namespace(user_dir={lightseq_fairseq.plugins.__path__[0]!r}))\n"
            "import sys; assert 'plugins' in sys.modules; import lightseq_fairseq.plugins\n"
            "print(optim.OPTIMIZER_REGISTRY['ls_adam'].__module__)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == "lightseq_fairseq.plugins.optimizer"

    def test_uses_the_models_own_buffer(self) -> None:
        module = nn.ParameterList(parameters(torch.float32))
        (buffer,) = flatten_parameters(module)
        build("ls_adam", list(module))
        assert buffer.intact()

    def test_frozen_parameters_are_left_alone(self) -> None:
        model = parameters()
        model[2].requires_grad_(False)
        before = model[2].clone()
        ours = build("ls_adam", model)
        set_gradients(0, [p for p in model if p.requires_grad])
        ours.step()
        assert torch.equal(model[2], before)
