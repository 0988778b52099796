"""Processes that share the file of algorithms (csrc/linear/algorithm_table.h), without a GPU.

Each process is a program of a few lines around the table. It obeys a command per line: "find
PRODUCT" prints the number of the algorithm, or "none"; "add PRODUCT NUMBER" prints the one to use.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# In place of cuBLASLt's header, which CUDA brings.
HEADER = """
#pragma once
#include <cstdint>
struct cublasLtMatmulAlgo_t { uint64_t data[8]; };
"""
PROGRAM = """
#include "linear/algorithm_table.h"
#include <iostream>
int main() {
  lightseq::AlgorithmTable table("table.txt");
  int64_t product = 0;
  for (std::string command; std::cin >> command >> product;) {
    const lightseq::AlgorithmTable::Key key = {product, -1, 1 << 30};
    std::optional<lightseq::Algorithm> algorithm;
    if (command == "find") {
      algorithm = table.find(key);
    } else {
      lightseq::Algorithm mine{};
      std::cin >> mine.algo.data[0];
      algorithm = table.add(key, mine);
    }
    if (algorithm) std::cout << algorithm->algo.data[0] << std::endl;
    if (!algorithm) std::cout << "none" << std::endl;
  }
}
"""


class Process:
    def __init__(self, program: Path, cache: Path) -> None:
        self.running = subprocess.Popen(
            [program], env={**os.environ, "XDG_CACHE_HOME": str(cache)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, *command: object) -> None:
        assert self.running.stdin is not None
        print(*command, file=self.running.stdin, flush=True)

    def answer(self) -> str:
        assert self.running.stdout is not None
        return self.running.stdout.readline().strip()

    def find(self, product: int) -> str:
        self.ask("find", product)
        return self.answer()

    def add(self, product: int, number: int) -> str:
        self.ask("add", product, number)
        return self.answer()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    (folder / "cublasLt.h").write_text(HEADER)
    (folder / "main.cpp").write_text(PROGRAM)
    csrc = Path(__file__).parents[2] / "csrc"
    # Set-up compiles fairseq, so there is a compiler.
    command = ["c++", "-std=c++20", f"-I{csrc}", f"-I{folder}", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "main"


@pytest.fixture
def start(program: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def of(cache: Path = tmp_path) -> Process:
        started.append(Process(program, cache))
        return started[-1]

    yield of
    for process in started:
        process.running.communicate(timeout=60)
        assert process.running.returncode == 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lightseq_fairseq" / "table.txt"


def test_processes_that_search_at_once_use_one_algorithm(start: Callable[..., Process]) -> None:
    first, second = start(), start()
    assert first.find(7) == second.find(7) == "none"
    assert second.add(7, 222) == "222"
    assert first.add(7, 111) == "222"
    assert first.find(7) == second.find(7) == start().find(7) == "222"


def test_many_processes_at_once(start: Callable[..., Process]) -> None:
    processes, products = [start() for _ in range(6)], range(60)
    for product in products:
        for number, process in enumerate(processes):
            process.ask("add", product, number)
    used = [[process.answer() for _ in products] for process in processes]
    again = start()
    assert used == [[again.find(product) for product in products]] * len(processes)


def test_what_another_process_has_searched_is_not_searched(start: Callable[..., Process]) -> None:
    first, second = start(), start()
    assert first.find(1) == "none"
    assert second.add(1, 5) == "5" and second.add(2, 6) == "6"
    assert first.find(1) == "5" and first.find(2) == "6" and first.find(3) == "none"


def test_damaged_files(start: Callable[..., Process], file: Path) -> None:
    assert start().add(1, 10) == "10" and start().add(2, 20) == "20"
    lines = file.read_bytes().splitlines(keepends=True)
    wrong = lines[0].replace(b" a ", b" b ", 1)
    assert wrong != lines[0]
    file.write_bytes(wrong + b"\x00\xff\n\n1 2\n" + lines[1] + lines[0][:-9])  # ends in half a line
    first, second = start(), start()
    assert first.find(1) == second.find(1) == "none" and first.find(2) == "20"
    assert first.add(1, 11) == "11" and second.add(1, 12) == "11"
    assert start().find(1) == "11"


def test_without_a_file(start: Callable[..., Process], file: Path, tmp_path: Path) -> None:
    process = start()
    assert process.add(1, 10) == "10"
    file.unlink()
    assert process.find(1) == "10" and process.add(2, 20) == "20"
    assert start().find(2) == "20"
    nowhere = tmp_path / "a file"
    nowhere.touch()
    process = start(nowhere)
    assert process.find(1) == "none" and process.add(1, 9) == "9" and process.find(1) == "9"
