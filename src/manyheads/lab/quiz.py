"""The quizzes and questions of the lectures, each answered by a computation.

`judge` gives, for every choice, whether it is right and the number that decides it; nothing is
looked up. An open question has no choices, and its findings are the answer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from manyheads.baselines.rnn import RnnConfig
from manyheads.config import change, nearest
from manyheads.errors import UserError
from manyheads.lab.claims.lectures.layer_norm_speed import unnormed
from manyheads.lab.claims.lectures.parallel_over_places import loss_of, models, steps_in_a_row
from manyheads.lab.claims.phrases import phrases, writer
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.attend import attend, attention_weights
from manyheads.nn.positions import Learned
from manyheads.presets import build, preset
from manyheads.summary import ModelSummary, count_parameters, summarize


@dataclass(frozen=True)
class Finding:
    """What was computed for a choice (by its letter) or for an open question.

    `bars` are numbers to compare, by their names; `weights` is a map of attention.
    """

    text: str
    letter: str = ""
    right: bool = True
    bars: dict[str, int | float] = field(default_factory=dict)
    weights: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Quiz:
    """A question of a lecture. `printed` is the answer that the lecture gives, empty if none.

    `therefore` is the answer in one sentence, `page` the page of `manyheads view` that shows it.
    """

    name: str
    lecture: str
    slide: str
    question: str
    choices: dict[str, str]
    judge: Callable[[], list[Finding]]
    therefore: str
    page: str = ""
    printed: str = ""
    remark: str = ""


def as_dict(quiz: Quiz) -> dict[str, Any]:
    """Plain values, with the answer computed."""
    findings = quiz.judge()
    return {
        "name": quiz.name,
        "lecture": quiz.lecture,
        "slide": quiz.slide,
        "question": quiz.question,
        "choices": quiz.choices,
        "answer": answer(findings),
        "therefore": quiz.therefore,
        "page": quiz.page,
        "printed": quiz.printed,
        "findings": [vars(finding) for finding in findings],
        "remark": quiz.remark,
    }


def answer(findings: list[Finding]) -> str:
    """The letters of the choices that are right."""
    return ", ".join(finding.letter for finding in findings if finding.letter and finding.right)


def question_text(quiz: Quiz) -> str:
    lines = [f'{quiz.name}: {quiz.lecture}, "{quiz.slide}"', quiz.question]
    return "\n".join([*lines, *(f"  ({letter}) {text}" for letter, text in quiz.choices.items())])


def answer_text(quiz: Quiz) -> str:
    findings = quiz.judge()
    lines = []
    for finding in findings:
        mark = f"({finding.letter}) {'right' if finding.right else 'wrong'}: " * bool(
            finding.letter
        )
        lines.append(f"  {mark}{finding.text}")
    if quiz.choices:
        given = f"; the lecture says {quiz.printed}" if quiz.printed else ""
        lines.insert(0, f"  Answer: {answer(findings)}{given}")
    lines.append(f"  Therefore: {quiz.therefore}")
    return "\n".join(lines + [f"  {quiz.remark}"] * bool(quiz.remark))


# --- Princeton L13 ---


def _thinking() -> list[Finding]:
    """q·k = 112 and 96 with 64 channels: ones against 1.75 and 1.5."""
    q = torch.ones(1, 1, 1, 64)
    k = torch.tensor([112 / 64, 96 / 64])[None, None, :, None].expand(1, 1, 2, 64)
    first, second = attention_weights(q, k)[0, 0, 0].tolist()
    mixtures = {"a": 0.5, "b": 0.54, "c": 0.88, "d": 0.12}
    nearest_letter = min(mixtures, key=lambda letter: abs(mixtures[letter] - first))
    plain = attention_weights(q, k, score="dot")[0, 0, 0, 0].item()
    why = (
        f"112 / 8 = 14, 96 / 8 = 12, softmax = {first:.4f}, {second:.4f} "
        f"(without the division by 8: {plain:.7f})"
    )
    mistakes = {
        "a": "equal weights need equal scores: this ignores 112 and 96",
        "b": f"112 / (112 + 96) = {112 / (112 + 96):.2f} divides the scores by their sum, "
        "without exp",
        "d": f"{second:.2f} is the weight of v₂: the two are exchanged",
    }
    return [
        Finding(why, letter, True, {"weight of v₁": first, "weight of v₂": second})
        if letter == nearest_letter
        else Finding(mistakes.get(letter, why), letter, False)
        for letter in mixtures
    ]


def _versus_lstm(dim: int = 512, length: int = 512) -> list[Finding]:
    """One block against one LSTM layer of the same width."""
    counted = summarize(GptConfig(vocab_size=1, dim=dim, layers=1, heads=8, max_length=length))
    operations = sum(n for part, n in counted.flops["token"].items() if part != "head")
    block = counted.block_parameters
    lstm = torch.nn.LSTM(dim, dim, device="meta")
    weights = sum(p.numel() for p in lstm.parameters() if p.ndim == 2)
    chains: dict[str, list[int]] = {}
    for n in (8, 32):
        tokens = torch.randint(256, (1, n))
        for name, model in models(64, n, torch.device("cpu")).items():
            chains.setdefault(name, []).append(steps_in_a_row(loss_of(model.double(), tokens)))
    transformer, recurrent = chains["transformer"], chains["lstm"]
    moved, moved_lstm = _change_by_order()
    return [
        Finding(
            f"a token costs {operations / 1e6:.1f}M FLOPs in a block and {2 * weights / 1e6:.1f}M "
            f"in an LSTM layer (d = {dim}, n = {length})",
            "a",
            operations < 2 * weights,
            {"Transformer block": operations, "LSTM layer": 2 * weights},
        ),
        Finding(
            f"from 8 to 32 words the longest chain of operations grows from {transformer[0]} to "
            f"{transformer[1]} in a Transformer, from {recurrent[0]} to {recurrent[1]} in an LSTM",
            "b",
            transformer[1] / transformer[0] < recurrent[1] / recurrent[0],
            {"Transformer, 32 words": transformer[1], "LSTM, 32 words": recurrent[1]},
        ),
        Finding(
            f"{block / 1e6:.2f}M in a block (12 d² and biases), {weights / 1e6:.2f}M in an LSTM "
            "layer (8 d²)",
            "c",
            block < weights,
            {"Transformer block": block, "LSTM layer": weights},
        ),
        Finding(
            f"with two words exchanged, the output at the last word changes by {moved:.1g} of its "
            f"norm in attention without positions, by {moved_lstm:.2f} in an LSTM",
            "d",
            moved > moved_lstm,
        ),
    ]


def _change_by_order() -> tuple[float, float]:
    """How much the output at the last word changes if the first two words are exchanged."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(1, 6, 32, generator=random, dtype=torch.float64)
    other = x[:, [1, 0, 2, 3, 4, 5]]
    torch.manual_seed(1)
    lstm = torch.nn.LSTM(32, 32, batch_first=True).double()
    with torch.no_grad():
        outputs = [(attend(*[y[None]] * 3)[0, 0, -1], lstm(y)[0][0, -1]) for y in (x, other)]
    before, after = outputs
    changes = [float((a - b).norm() / a.norm()) for a, b in zip(before, after, strict=True)]
    return changes[0], changes[1]


def _why_scaled() -> list[Finding]:
    """Standard deviation of q·k, and the mean slope of the softmax over 16 keys."""
    findings = []
    for dim in (4, 64, 1024):
        torch.manual_seed(1)
        q, k = torch.randn(1, 1, 512, dim), torch.randn(1, 1, 16, dim)
        scores = (q @ k.mT)[0, 0]
        slopes = []
        for score in ("dot", "scaled-dot"):
            weights = attention_weights(q, k, score=score)
            slopes.append(float((weights * (1 - weights)).amax(-1).mean()))
        findings.append(
            Finding(
                f"d_k = {dim}: q·k has a standard deviation of {scores.std():.1f} "
                f"(√d_k = {math.sqrt(dim):.0f}); the largest slope α(1 − α) of the softmax is "
                f"{slopes[0]:.3f} on average, {slopes[1]:.3f} after the division by √d_k",
                bars={"slope": slopes[0], "slope after the division": slopes[1]},
            )
        )
    return findings


# --- Princeton L9 ---

SCORES = [[1.0, 0, -1, -1], [1, 1, -1, 0], [0, 1, 1, -1], [-1, -1, 2, 1]]


def _masked() -> list[Finding]:
    """The scores are queries against unit keys, so that q_i · k_j is the printed matrix."""
    q, k = torch.tensor(SCORES)[None, None], torch.eye(4)[None, None]
    masked = attention_weights(q, k, score="dot", rule="causal")[0, 0, 1, 1].item()
    full = attention_weights(q, k, score="dot")[0, 0, 1, 1].item()
    values = {"A": 0.0, "B": 0.5, "C": math.e / (2 * math.e + 1 / math.e + 1), "D": 1.0}
    weights = attention_weights(q, k, score="dot", rule="causal")[0, 0].tolist()
    texts = {
        "A": f"α₂₂ is {masked:.4f}: the mask hides later positions, not the position itself",
        "B": f"two positions are left, with equal scores: α₂₂ = e / (e + e) = {masked:.4f}",
        "C": f"this forgets the mask: over all four positions α₂₂ is {full:.4f}",
        "D": "only the first row has a single position left; the second has two",
    }
    return [
        Finding(texts[letter], letter, right, weights=weights if right else [])
        for letter, value in values.items()
        for right in [abs(value - masked) < 1e-6]
    ]


def _understanding() -> list[Finding]:
    base, one_head = (
        summarize(change(preset("transformer-base"), {"heads": h}), 512) for h in (8, 1)
    )
    attention = {kind: _attention_flops(flops) for kind, flops in base.flops.items()}
    attention["source"] -= base.flops["source"]["cross-attention"]  # the decoder's keys and values
    feed_forward = base.flops["source"]["feed-forward"]
    longest, refused = 16, False
    model = build("gpt3-small", layers=1, dim=16, heads=2, vocab_size=9, max_length=longest)
    assert isinstance(model, Gpt)
    assert isinstance(model.config.position, Learned)
    try:
        model(torch.zeros(1, longest + 1, dtype=torch.long))
    except UserError:
        refused = True
    near, far = (_scores_share(n) for n in (512, 50_000))
    return [
        Finding(
            f"a token of the encoder of Transformer-base costs {attention['source'] / 1e6:.1f}M "
            f"FLOPs in attention, {feed_forward / 1e6:.1f}M in feed-forward (n = 512); in the "
            f"decoder, with cross-attention, {attention['target'] / 1e6:.1f}M and "
            f"{feed_forward / 1e6:.1f}M, so (A) is {attention['target'] > feed_forward} there",
            "A",
            attention["source"] > feed_forward,
            {"attention, encoder": attention["source"], "feed-forward": feed_forward},
        ),
        Finding(
            f"8 heads of 64: {base.sequence_flops / 1e9:.1f} GFLOPs, one head of 512: "
            f"{one_head.sequence_flops / 1e9:.1f}",
            "B",
            base.sequence_flops > one_head.sequence_flops,
            {"8 heads": base.sequence_flops, "one head": one_head.sequence_flops},
        ),
        Finding(
            f"learned positions for {longest} tokens "
            f"{'refuse' if refused else 'accept'} {longest + 1}",
            "C",
            refused,
        ),
        Finding(
            f"scores and their sums are {near:.0%} of BERT-base's FLOPs at 512 tokens and "
            f"{far:.0%} at 50,000, where a token costs "
            f"{_bert_token(50_000) / _bert_token(512):.1f} times as much",
            "D",
            _bert_token(50_000) < 1.5 * _bert_token(512),
            {"FLOPs a token, n = 512": _bert_token(512), "n = 50,000": _bert_token(50_000)},
        ),
    ]


def _attention_flops(flops: dict[str, int]) -> int:
    return sum(count for part, count in flops.items() if "attention" in part)


def _bert(length: int) -> ModelSummary:
    return summarize(change(preset("bert-base"), {"max_length": length}), length)


def _bert_token(length: int) -> int:
    return _bert(length).forward_flops["token"]


def _scores_share(length: int) -> float:
    """Share of QKᵀ and of the weighted sums in all FLOPs."""
    flops = _bert(length).flops["token"]
    return (flops["attention scores"] + flops["attention mixing"]) / _bert_token(length)


# --- Aalborg ---


def _order() -> list[Finding]:
    moved, _ = _change_by_order()
    stays = moved < 1e-12
    return [
        Finding(f"the output at the last word changes by {moved:.1g} of its norm", "a", stays),
        Finding("the order is nowhere in softmax(QKᵀ)V: positions must add it", "b", not stays),
    ]


def _long() -> list[Finding]:
    findings = []
    for n in (30, 512, 50_000):
        findings.append(
            Finding(
                f"n = {n:,}: n² = {n * n:,} scores a head; they and the weighted sums are "
                f"{_scores_share(n):.0%} of the FLOPs of BERT-base",
                bars={"scores and sums": _scores_share(n), "the rest": 1 - _scores_share(n)},
            )
        )
    return findings


def _normalized_gradients() -> list[Finding]:
    """Norms of the gradients of each block's weights in an untrained stack of 12 blocks."""
    text = phrases(200, torch.device("cpu"))
    findings = []
    for kind in ("with", "without"):
        model = writer(text, layers=12, dim=32, length=16, seed=1)
        model = model if kind == "with" else unnormed(model)
        loss = text.loss_of(model, 16, 16, 1)(0)
        loss.backward()
        norms = [
            math.sqrt(
                sum(float(w.grad.square().sum()) for w in block.parameters() if w.grad is not None)
            )
            for block in model.decoder.blocks
        ]
        findings.append(
            Finding(
                f"{kind} norms the gradients of the 12 blocks have norms from {min(norms):.3g} to "
                f"{max(norms):.3g} (largest / smallest {max(norms) / min(norms):.3g}), at a loss "
                f"of {float(loss.detach()):.3g} (single words {text.entropy:.3g})",
                bars={"smallest": min(norms), "largest": max(norms)},
            )
        )
    return findings


# --- Sydney ---


def _dot_products() -> list[Finding]:
    vectors = [[1, 2], [2, 3]], [[1, 2, 1], [2, 3, 4]], [[1, 2, 1, 1], [2, 3, 4, 8]]
    products = [int(torch.tensor(a) @ torch.tensor(b)) for a, b in vectors]
    last = products[-1]
    return [
        Finding(
            f"the products are {', '.join(map(str, products))}",
            letter,
            True,
            {
                f"{channels} channels": value
                for channels, value in zip((2, 3, 4), products, strict=True)
            },
        )
        if value == last
        else Finding(
            f"{value} is the product of the first {2 + products.index(value)}", letter, False
        )
        for letter, value in (("a", 8), ("b", 12), ("c", 20))
    ]


def _extra_parameters() -> list[Finding]:
    summary = summarize(RnnConfig(vocab_size=8000, dim=256), 32)
    added = summary.parts["cross-attention"]
    return [
        Finding(
            f"attention has {added:,} of the {summary.parameters:,} parameters of an LSTM "
            f"encoder–decoder of width 256 ({added / summary.parameters:.1%})",
            bars={"attention": added, "the rest": summary.parameters - added},
        )
    ]


def _all_at_once() -> list[Finding]:
    """The gradient of the output at a word with respect to later words."""
    findings = []
    for rule in ("full", "causal"):
        torch.manual_seed(1)
        x = torch.randn(1, 1, 5, 16, requires_grad=True)
        attend(x, x, x, rule=rule)[0, 0, 1].sum().backward()
        assert x.grad is not None
        seen = float(x.grad[0, 0, 2:].abs().max())
        findings.append(
            Finding(
                f"{'with' if rule == 'causal' else 'without'} the mask the output at word 2 "
                f"depends on words 3 to 5 with a gradient of {seen:.3g}",
                weights=attention_weights(x, x, rule=rule)[0, 0].tolist(),
            )
        )
    return findings


# --- UMass ---


def _mask_function() -> list[Finding]:
    torch.manual_seed(1)
    q = torch.randn(1, 1, 4, 8)
    weights = attention_weights(q, q, rule="causal")[0, 0]
    zeros = int((weights == 0).sum())
    text = f"added to the scores before the softmax, it makes {zeros} of 16 weights exactly 0"
    return [Finding(text, weights=weights.tolist())]


def _unembedding() -> list[Finding]:
    tied, untied = (
        count_parameters(change(preset("gpt3-small"), {"tie": tie})) for tie in ("all", "none")
    )
    return [
        Finding(
            f"it is Eᵀ, the transpose of the embedding: GPT-3 Small has {tied / 1e6:.0f}M "
            f"parameters with one matrix and {untied / 1e6:.0f}M with two",
            bars={"one matrix": tied, "two matrices": untied},
        )
    ]


POLL = "The slide links to a poll and prints no question; this one covers what it recalls."

QUIZZES = (
    Quiz(
        name="thinking",
        lecture="Princeton L13",
        slide="Self-attention, step 3",
        question='What would be the output vector for the word "Thinking" approximately? '
        "(q₁·k₁ = 112, q₁·k₂ = 96, d_k = 64)",
        choices={
            "a": "0.5 v₁ + 0.5 v₂",
            "b": "0.54 v₁ + 0.46 v₂",
            "c": "0.88 v₁ + 0.12 v₂",
            "d": "0.12 v₁ + 0.88 v₂",
        },
        judge=_thinking,
        therefore="Divide by √d_k, then apply softmax: the larger score takes most of the weight.",
        page="attention",
        printed="c",
    ),
    Quiz(
        name="versus-lstm",
        lecture="Princeton L13",
        slide="Transformers vs LSTMs",
        question="Which of the following statements is correct?",
        choices={
            "a": "Transformers have less operations compared to LSTMs",
            "b": "Transformers are easier to parallelize compared to LSTMs",
            "c": "Transformers have less parameters compared to LSTMs",
            "d": "Transformers are better at capturing positional information than LSTMs",
        },
        judge=_versus_lstm,
        therefore="Attention has no chain over the positions: all are computed at once.",
        printed="b",
    ),
    Quiz(
        name="why-scaled",
        lecture="Princeton L13",
        slide="Self-attention, step 2",
        question="Why scaled dot product?",
        choices={},
        judge=_why_scaled,
        therefore="Without the division, scores grow with d_k: the softmax saturates and its "
        "gradient vanishes.",
        page="flow",
    ),
    Quiz(
        name="masked",
        lecture="Princeton L9",
        slide="Masked (multi-head) attention",
        question="The matrix of q_i·k_j/√d_k is (1 0 −1 −1; 1 1 −1 0; 0 1 1 −1; −1 −1 2 1). What "
        "should be the value of α₂₂ in masked attention?",
        choices={"A": "0", "B": "0.5", "C": "e / (2e + e⁻¹ + 1)", "D": "1"},
        judge=_masked,
        therefore="Row 2 sees positions 1 and 2 only, and their scores are equal.",
        page="attention",
        printed="B",
    ),
    Quiz(
        name="understanding",
        lecture="Princeton L9",
        slide="Understanding Transformers",
        question="Which of the following is CORRECT?",
        choices={
            "A": "Multi-head attention is more computationally expensive than feedforward layers",
            "B": "Multi-head attention is more computationally expensive than single-head "
            "attention",
            "C": "It is hard to apply Transformers to sequences that are longer than the "
            "pre-defined max_seq_length L",
            "D": "We can easily scale Transformers to long sequences",
        },
        judge=_understanding,
        therefore="A table of learned positions has no row for position L + 1.",
        page="positions",
        printed="C",
    ),
    Quiz(
        name="recap",
        lecture="Aalborg",
        slide="Recap Self Attention",
        question="A self-attention layer without positions reads the same words in another order. "
        "Does the output at a word change?",
        choices={"a": "no", "b": "yes"},
        judge=_order,
        therefore="Attention sums over a set: without positions, the order of the words is lost.",
        page="positions",
        remark=POLL,
    ),
    Quiz(
        name="normalized-gradients",
        lecture="Aalborg",
        slide="Layer Normalisation",
        question="LayerNorm's success may be due to its normalizing gradients. Does it?",
        choices={},
        judge=_normalized_gradients,
        therefore="Compare the largest gradient with the smallest: the closer they are, the more "
        "evenly the blocks learn.",
    ),
    Quiz(
        name="long",
        lecture="Aalborg",
        slide="Drawbacks",
        question="n ≤ 30 for a sentence, n = 512 in practice. But what if we'd like n ≥ 50,000?",
        choices={},
        judge=_long,
        therefore="The n² scores take over: at that length they cost more than everything else.",
    ),
    Quiz(
        name="extra-parameters",
        lecture="Sydney",
        slide="We will solve this with 'attention'",
        question="Attention resolves the bottleneck without introducing many extra parameters. "
        "How many?",
        choices={},
        judge=_extra_parameters,
        therefore="Few: attention adds projections, no matrix that grows with the text.",
    ),
    Quiz(
        name="dot-products",
        lecture="Sydney",
        slide="Why do scaled dot-product attention?",
        question="[1, 2]·[2, 3] = 8 and [1, 2, 1]·[2, 3, 4] = 12. How much is "
        "[1, 2, 1, 1]·[2, 3, 4, 8]?",
        choices={"a": "8", "b": "12", "c": "20"},
        judge=_dot_products,
        therefore="The sum grows with the number of channels; this is why q·k is divided by √d_k.",
        page="flow",
        printed="c",
        remark="Every slide of this lecture links to one poll (menti.com) and prints no question "
        "of it; this one asks for the slide's own example.",
    ),
    Quiz(
        name="all-at-once",
        lecture="Sydney",
        slide="Training needs to account for what is known at each step",
        question="What if we try to train on all at once?",
        choices={},
        judge=_all_at_once,
        therefore="Without the mask each position sees the words that it must predict.",
        page="attention",
        remark='"Cheating!", says the slide: mask out these values.',
    ),
    Quiz(
        name="mask",
        lecture="UMass",
        slide="Masking out the future",
        question="What is this mask function? (0 −∞ −∞ −∞; 0 0 −∞ −∞; 0 0 0 −∞; 0 0 0 0)",
        choices={},
        judge=_mask_function,
        therefore="The causal mask: −∞ above the diagonal hides every later position.",
        page="attention",
    ),
    Quiz(
        name="unembedding",
        lecture="UMass",
        slide="Language modeling head",
        question='Why "unembedding"?',
        choices={},
        judge=_unembedding,
        therefore="The embedding turns tokens into vectors; its transpose turns vectors into "
        "scores of tokens.",
        page="lens",
    ),
)


def find(name: str) -> Quiz:
    known = {quiz.name: quiz for quiz in QUIZZES}
    if name not in known:
        raise UserError(f"there is no quiz '{name}': {nearest(name, [*known, 'lab'])}")
    return known[name]
