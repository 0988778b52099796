"""The configuration that generate's loop reads has fairseq's values, and each is looked up only
once."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from omegaconf import DictConfig

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.cli.translate.cached_config import looked_up_once

fairseq_compat.prepare()

from fairseq import options  # noqa: E402
from fairseq.dataclass.utils import convert_namespace_to_omegaconf  # noqa: E402


@pytest.fixture
def config() -> Any:
    words = ["data", "--path", "model.pt", "--beam", "7", "--remove-bpe"]
    args = options.parse_args_and_arch(options.get_generation_parser(), words)
    return convert_namespace_to_omegaconf(args)


def test_reads_what_the_configuration_says(config: Any) -> None:
    settings = looked_up_once(config)
    for part in ("common_eval", "dataset", "generation"):
        for name, value in getattr(config, part).items():
            assert getattr(getattr(settings, part), name) == value, f"{part}.{name}"
    assert isinstance(settings.task, DictConfig) and settings.task == config.task
    assert getattr(settings.generation, "no_such_setting", 5) == 5
    with pytest.raises(AttributeError, match="no_such_setting"):
        _ = settings.generation.no_such_setting


def test_looks_once(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    real = DictConfig.__getattr__
    monkeypatch.setattr(
        DictConfig, "__getattr__", lambda self, name: looks.append(name) or real(self, name)
    )
    settings = looked_up_once(config)
    looks.clear()
    assert [settings.generation.beam for _ in range(5)] == [7] * 5
    assert looks == ["beam"]


def test_what_is_set_reaches_both(config: Any) -> None:
    settings = looked_up_once(config)
    assert settings.dataset.max_tokens is None
    settings.dataset.max_tokens = 12000
    assert settings.dataset.max_tokens == config.dataset.max_tokens == 12000


def test_a_copy_is_set_alone(config: Any) -> None:
    settings = looked_up_once(config)
    for copied in (copy.copy(settings.generation), copy.deepcopy(settings.generation)):
        copied.beam = 3
        assert copied.beam == 3
        assert settings.generation.beam == config.generation.beam == 7


def test_is_logged_as_the_configuration(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logging.getLogger("any").info(looked_up_once(config))
    assert caplog.messages == [str(config)]
