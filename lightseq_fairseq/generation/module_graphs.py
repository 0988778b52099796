"""CUDA graphs of a module's passes without gradients.

The kernels of a small batch take less time than their launches. So the module runs as a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightseq_fairseq.generation.parameter_addresses import ParameterAddresses
from lightseq_fairseq.generation.turns import Turns
from lightseq_fairseq.memory.graphs import Graphs

Result = TypeVar("Result")

_LEAST_BLOCK = 1 << 19  # bytes; room for batches of 20 000 tokens


class ModuleGraphs:
    """Runs passes of one module as CUDA graphs, where they can be captured.

    The graphs and the block that they read are kept from batch to batch, until the weights move.
    Several threads and streams may use this object; their calls run one after another. A copy is
    empty.

    Args:
        what: a short name of the passes, for the log.
    """

    _addresses: ParameterAddresses
    _block: Tensor

    def __init__(self, what: str) -> None:
        self._what, self._turns = what, Turns()
        self._graphs: Graphs | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._what,)

    @torch.no_grad()
    def run(
        self, module: nn.Module, device: torch.device, size: int, send: Callable[[Tensor], None],
        launch: Callable[[Graphs, Tensor], Result],
    ) -> Result:  # fmt: skip
        """A pass of ``module`` on ``device``; the host does not wait.

        size: of the batch, in bytes. send: copies the batch to the block, uint8 [size]. launch:
            computes the result from it by the graphs, and copies it: the next pass overwrites it.
        """
        with self._alone(device):
            graphs = self._open(module, device, size)
            block = self._block[:size]
            send(block)
            return launch(graphs, block)

    @contextlib.contextmanager
    def _alone(self, device: torch.device) -> Iterator[None]:
        """No other thread or stream uses the graphs; an error drops them."""
        with self._turns.turn(device):
            try:
                yield
            except BaseException:
                self._forget()
                raise

    def _open(self, module: nn.Module, device: torch.device, size: int) -> Graphs:
        """The graphs; new ones if the module changed, its weights moved or the block must grow."""
        if self._graphs is None or size > len(self._block) or not self._addresses.intact(module):
            self._forget()
            self._graphs = Graphs(device, self._what)
            self._addresses = ParameterAddresses(module)
            room = max(_LEAST_BLOCK, 1 << (size - 1).bit_length())
            with torch.inference_mode(False):  # else only calls in inference mode could write it
                self._block = torch.zeros(room, dtype=torch.uint8, device=device)
        return self._graphs

    def _forget(self) -> None:
        """Drop the graphs, for example after an error within a pass."""
        if self._graphs is not None:
            self._graphs.clear()
        self._graphs = None
