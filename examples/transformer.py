"""The Transformer in one file: model, subwords, training, beam search, BLEU.

    python examples/transformer.py            train on the phrasebook, then translate its test split
    python examples/transformer.py --steps 50 a quick look

An encoder–decoder as in "Attention Is All You Need" (Vaswani et al., 2017), with the norms before
the sub-layers. It needs torch, tokenizers and sacrebleu; the sentence pairs come from
`manyheads.phrasebook`, and any other list of pairs would do.

Shapes: b sentences · t target positions · s source positions · h heads · c channels of a head · d
width of the model · v subwords in the vocabulary.
"""

import argparse
import math
import random
import time

import sacrebleu
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.phrasebook import sentences

PAD, START, END = 0, 1, 2  # special tokens

# ---------------------------------------------------------------------------------------------
# Model


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q kᵀ / √c) v; a query ignores the keys where `mask` is False."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # [b h t s]
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v  # [b h t c]


class MultiHeadAttention(nn.Module):
    """Concat(head_1, …, head_h) W^O,  head_i = attention(x W_i^Q, y W_i^K, y W_i^V)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.split(part) for part in (self.q(x), self.k(y), self.v(y)))
        return self.out(attention(q, k, v, mask).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [b t d] → [b h t c]


class FeedForward(nn.Sequential):
    """max(0, x W₁ + b₁) W₂ + b₂, the same for every position."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__(nn.Linear(dim, ffn_dim), nn.ReLU(), nn.Linear(ffn_dim, dim))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each x + f(norm(x))."""

    def __init__(self, dim: int, heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.attention, self.feedforward = MultiHeadAttention(dim, heads), FeedForward(dim, ffn_dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, mask)
        return x + self.feedforward(self.norms[1](x))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the encoder output, feed-forward."""

    def __init__(self, dim: int, heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.attention, self.cross = (MultiHeadAttention(dim, heads) for _ in range(2))
        self.feedforward = FeedForward(dim, ffn_dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x: Tensor, causal: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, causal)
        x = x + self.cross(self.norms[1](x), memory, memory_mask)
        return x + self.feedforward(self.norms[2](x))


def sinusoids(length: int, dim: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d))."""
    channels = torch.arange(0, dim, 2, dtype=torch.float64)
    angles = torch.arange(length)[:, None] / 10_000 ** (channels / dim)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)  # [t d]


class Transformer(nn.Module):
    """P(target | source). One matrix embeds source and target and, transposed, gives the logits."""

    def __init__(
        self, vocab_size: int, dim: int = 128, heads: int = 4, layers: int = 2, ffn_dim: int = 512
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, ffn_dim) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(dim, heads, ffn_dim) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return x * math.sqrt(x.shape[-1]) + sinusoids(tokens.shape[1], x.shape[-1]).to(x)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder output [b s d], and the mask of its padding [b 1 1 s]."""
        mask = (source != PAD)[:, None, None, :]
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, target: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """logits[:, t] predict the token after target[:, t], from target[:, : t + 1] only."""
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, causal, memory, memory_mask)
        return self.decoder_norm(x) @ self.embedding.weight.T  # [b t v]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, *self.encode(source))


# ---------------------------------------------------------------------------------------------
# Text ↔ tokens


def learn_subwords(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-pair encoding: merge the most frequent pair of neighbours until the table is full."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<start>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pad(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def make_batches(
    pairs: list[tuple[list[int], list[int]]], batch_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Sentences of similar length together, so that little is padding."""
    batches, rows = [], []
    for pair in sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0]))):
        rows.append(pair)
        if len(rows) * len(pair[1]) >= batch_tokens:
            batches.append(rows)
            rows = []
    return [tuple(map(pad, zip(*rows, strict=True))) for rows in batches]


# ---------------------------------------------------------------------------------------------
# Training


def learning_rate(step: int, dim: int, warmup: int) -> float:
    """d^-0.5 · min(step^-0.5, step · warmup^-1.5): up in a line, then down as 1/√step."""
    return dim**-0.5 * min(step**-0.5, step * warmup**-1.5)


def train(model: Transformer, batches: list[tuple[Tensor, Tensor]], steps: int) -> None:
    """Teacher forcing: predict every token of the target from the true ones before it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    warmup = min(400, max(1, steps // 4))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: learning_rate(done + 1, model.embedding.embedding_dim, warmup)
    )
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        source, target = random.choice(batches)
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            seconds = time.perf_counter() - begun
            print(f"step {step}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


# ---------------------------------------------------------------------------------------------
# Beam search


@torch.no_grad()
def translate(
    model: Transformer, source: list[int], beam: int = 4, penalty: float = 0.6
) -> list[int]:
    """The target with the largest log P / length^penalty among those that the beam holds."""
    memory, mask = model.encode(torch.tensor([source]))
    texts, scores = torch.tensor([[START]]), torch.zeros(1)  # the beam: [k t], log P [k]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, 2 * len(source) + 10):
        logits = model.decode(texts, memory.expand(len(texts), -1, -1), mask)[:, -1]
        extended = scores[:, None] + logits.log_softmax(-1)  # [k v]
        best, index = extended.flatten().topk(2 * beam)  # at most `beam` of them are ends
        parents, tokens = index // extended.shape[1], index % extended.shape[1]
        for score, parent in zip(best[tokens == END], parents[tokens == END], strict=True):
            ended.append((score.item() / length**penalty, texts[parent, 1:].tolist()))
        if len(ended) >= beam:
            break
        alive = (tokens != END).nonzero().flatten()[:beam]
        texts = torch.cat([texts[parents[alive]], tokens[alive, None]], dim=1)
        scores = best[alive]
    return max(ended)[1] if ended else texts[0, 1:].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and test a Transformer on the phrasebook.")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--sentences", type=int, default=1000, help="of the test split")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)

    pairs = sentences("en-de", "train", 50_000)
    tokenizer = learn_subwords([text for x in pairs for text in (x.source, x.target)], 4000)
    sources = [x.ids for x in tokenizer.encode_batch([pair.source for pair in pairs])]
    targets = [x.ids for x in tokenizer.encode_batch([pair.target for pair in pairs])]
    encoded = [(s, [START, *t, END]) for s, t in zip(sources, targets, strict=True)]
    model = Transformer(tokenizer.get_vocab_size())
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, make_batches(encoded, batch_tokens=2500), arguments.steps)

    test = sentences("en-de", "test", arguments.sentences)
    model.eval()
    outputs = [tokenizer.decode(translate(model, tokenizer.encode(x.source).ids)) for x in test]
    for pair, output in list(zip(test, outputs, strict=True))[:5]:
        print(f"  {pair.source}\n    {output}")
    bleu = sacrebleu.corpus_bleu(outputs, [[pair.target for pair in test]])
    print(f"test BLEU {bleu.score:.1f} on {len(test)} sentences, seed {arguments.seed}")


if __name__ == "__main__":
    main()
