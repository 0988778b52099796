"""Train an encoder-decoder Transformer with the layers alone: without fairseq, and without files.

    python -m examples.layers.train           # on a GPU if there is one, else on the CPU
    python -m examples.layers.train --bf16    # 16-bit model, float32 master weights
    torchrun --nproc-per-node 2 -m examples.layers.train   # two ranks, DistributedDataParallel

The task is to write a number from back to front, "3 1 4" -> "4 1 3". Every update has new random
numbers.

Shapes: B = sentences, S and L = longest source and target, T_src and T = packed source and target
tokens, V = vocabulary, C = model width.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightseq_fairseq import layers
from lightseq_fairseq.layers.sites import SITES_PER_LAYER
from lightseq_fairseq.memory.packing import Segments
from lightseq_fairseq.memory.parameters import flatten_parameters
from lightseq_fairseq.step.flat_adam import FlatAdam

PAD, EOS, ZERO = 1, 2, 4  # the first two as in fairseq; digit d is token ZERO + d
VOCABULARY = 16  # a multiple of 8, for fast 16-bit GEMMs on a GPU
LONGEST = 12  # digits of a number


class Transformer(nn.Module):
    """Encoder and decoder stacks on packed tokens; both sides and the output share an embedding.

    Args:
        width: C. depth: layers of each stack. dropout: rate of all dropouts.
    """

    def __init__(self, width: int = 64, depth: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = layers.Embedding(
            VOCABULARY, width, PAD, positions=LONGEST + 1, dropout=dropout
        )
        # Each place with dropout has a number, its site, so that no two of them draw the same mask.
        # The embedding is called twice, with sites 0 and 1; the layers' sites come after these.
        # Without `site`, layers number themselves in the order of their first calls.
        sites = iter(range(SITES_PER_LAYER, 1 << 20, SITES_PER_LAYER))
        rates = {"dropout": dropout, "attention_dropout": dropout, "activation_dropout": dropout}

        def stack(layer: Callable[..., nn.Module]) -> nn.ModuleList:
            sizes = (width, 2 * width, 4)  # model, feed-forward, heads
            return nn.ModuleList(
                layer(*sizes, normalize_before=True, site=next(sites), **rates)
                for _ in range(depth)
            )

        self.encoder, self.encoder_norm = stack(layers.EncoderLayer), nn.LayerNorm(width)
        self.decoder, self.decoder_norm = stack(layers.DecoderLayer), nn.LayerNorm(width)

    def flatten(self) -> None:
        """Put all parameters into one buffer, so that fused GEMMs and Adam copy nothing.

        Call it after the model has its device and dtype, because ``.to()`` gives each parameter
        its own memory again. It does not change results.
        """
        flatten_parameters(self, layers.fused_groups([*self.encoder, *self.decoder]))

    def forward(
        self, source: Tensor, source_of: Segments, previous: Tensor, target_of: Segments,
        rng: Tensor,
    ) -> Tensor:  # fmt: skip
        """Source tokens int64 [T_src], previous target tokens int64 [T] -> logits [T, V].

        source_of, target_of: where sentences begin and end. rng: from ``layers.draw_rng``, a
        new one for each forward pass.
        """
        x = self.embedding(source, source_of, rng, site=0)
        memory = layers.run_encoder(self.encoder, self.encoder_norm, x, source_of, rng)
        x = self.embedding(previous, target_of, rng, site=1)
        stack = (self.decoder, self.decoder_norm)
        x = layers.run_decoder(*stack, x, memory, target_of, source_of, rng)
        return layers.linear(x, self.embedding.weight)


class Optimizer:
    """FlatAdam with a warm-up and clipping; for a bf16 model also float32 master weights.

    torch.autocast does not change these layers: they compute in the dtype of their parameters. So
    the model itself is converted. Updates are added to float32 copies of the parameters: bf16 has
    8 significant bits, so most updates would be rounded away.

    Args:
        model: on its device, in float32; it is flattened here.
    """

    def __init__(self, model: Transformer, lr: float, bf16: bool) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.trained] if bf16 else None
        if bf16:
            model.to(torch.bfloat16)
        model.flatten()
        owned = self.masters or self.trained
        self.adam = FlatAdam(owned, lr=lr, betas=(0.9, 0.98), weight_decay=1e-4)
        self.lr, self.updates = lr, 0

    def step(self) -> None:
        """Update the parameters by their gradients, and clear the gradients."""
        self.updates += 1
        self.adam.param_groups[0]["lr"] = self.lr * min(1.0, self.updates / 50)
        for master, parameter in zip(self.masters or [], self.trained):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.adam.clip_grad_norm(1.0)
        self.adam.step()
        self.adam.zero_grad()
        if self.masters is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.trained, self.masters)


def pairs(seed: int, sentences: int) -> tuple[Tensor, Tensor, Tensor]:
    """A padded batch: source [B, S], the decoder's input [B, L] and its labels [B, L], int64."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LONGEST + 1, (sentences, 1), generator=draw)
    digits = torch.randint(ZERO, ZERO + 10, (sentences, LONGEST + 1), generator=draw)
    place = torch.arange(LONGEST + 1)
    ends = torch.where(place == lengths, EOS, PAD)
    source = torch.where(place < lengths, digits, ends)
    labels = torch.where(place < lengths, digits.gather(1, (lengths - 1 - place).clamp(0)), ends)
    # The input of the decoder is the labels shifted right by one, with EOS first (as in fairseq).
    previous = torch.where(labels == PAD, PAD, labels.roll(1, 1))
    previous[:, 0] = EOS
    return source, previous, labels


def train(
    model: Transformer, updates: int, *, sentences: int = 128, bf16: bool = False, rank: int = 0,
    ranks: int = 1, seed: int = 1,
) -> list[tuple[float, float]]:  # fmt: skip
    """Train a model; returns the loss and the share of right tokens of each update.

    The loss is the negative log-likelihood of a token in nats, without smoothing.

    Args:
        model: on its device, in float32.
        sentences: B, of all ranks together.
        rank, ranks: of this process. If there are several, torch.distributed is initialised.
    """
    device = next(model.parameters()).device
    optimizer = Optimizer(model, 5e-3, bf16)
    module = DistributedDataParallel(model) if ranks > 1 else model
    torch.manual_seed(seed + rank)  # each rank draws dropout masks of its own
    course = []
    for update in range(updates):
        source, previous, labels = (x[rank::ranks].to(device) for x in pairs(update, sentences))
        # Pads are not computed: the mask says where the real tokens are, and `pack` takes them.
        source_of, target_of = Segments.from_mask(source != PAD), Segments.from_mask(labels != PAD)
        rng = layers.draw_rng(device)
        logits = module(source_of.pack(source), source_of, target_of.pack(previous), target_of, rng)
        losses, nll, right = layers.label_smoothed_cross_entropy(
            logits, target_of.pack(labels), 0.1, PAD, accuracy=True
        )
        tokens = torch.tensor(len(nll), device=device)
        sums = torch.stack([nll.sum(), right.sum(), tokens])
        if ranks > 1:
            torch.distributed.all_reduce(sums)
        # The mean loss of the tokens of all ranks. DistributedDataParallel divides gradients by the
        # number of ranks, so multiply by it. backward() overwrites `logits` with their gradient, so
        # use `logits` before it. A second backward() through the same loss is an error.
        (losses.sum() * (ranks / sums[2])).backward()
        optimizer.step()
        course.append((sums[:2] / sums[2]).tolist())
        if rank == 0 and ((update + 1) % 50 == 0 or update + 1 == updates):
            loss, accuracy = course[-1]
            print(f"update {update + 1}  loss {loss:.4f}  accuracy {accuracy:.3f}", flush=True)
    return course


@torch.no_grad()
def translate(model: Transformer, source: Tensor) -> list[list[int]]:
    """The digits that the model writes for each sentence of source int64 [B, S], by greedy
    search."""
    was_training = model.training
    model.eval()
    source_of, rng = Segments.from_mask(source != PAD), layers.draw_rng(source.device)
    written = source.new_full((len(source), 1), EOS)
    for _ in range(LONGEST + 1):
        target_of = Segments.from_mask(torch.ones_like(written, dtype=torch.bool))
        logits = model(source_of.pack(source), source_of, target_of.pack(written), target_of, rng)
        # `pad` is the inverse of `pack`: [T, V] -> [B, L, V], with zeros at pads.
        following = target_of.pad(logits)[:, -1:].argmax(-1)
        written = torch.cat([written, following], 1)
    model.train(was_training)
    return [digits(row) for row in written[:, 1:].tolist()]


def digits(tokens: list[int]) -> list[int]:
    """The digits of a sentence, up to its end."""
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    return [token - ZERO for token in tokens[:end]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=300, help="number of updates")
    parser.add_argument(
        "--sentences", type=int, default=128, help="sentences per batch, over all ranks"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout probability")
    parser.add_argument("--bf16", action="store_true", help="16-bit model, float32 master weights")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, even if there is a GPU")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not given.cpu
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks > 1:  # started by torchrun
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    if rank == 0:
        print("300 updates take 28 s on one core of an AMD EPYC", flush=True)
    torch.manual_seed(1)  # the same model on all ranks
    model = Transformer(dropout=given.dropout).to(device)
    train(model, given.updates, sentences=given.sentences, bf16=given.bf16, rank=rank, ranks=ranks)
    if rank == 0:
        source, _, _ = pairs(given.updates, 4)  # numbers that training has not seen
        for given_tokens, found in zip(source.tolist(), translate(model, source.to(device))):
            print(*digits(given_tokens), "->", *found)
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
