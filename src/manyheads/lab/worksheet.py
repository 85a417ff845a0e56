"""The lab of Sydney's lecture as a worksheet: stacks, masks, rotary positions, Hugging Face.

Each step has a task, the lines that solve it, and a check that runs them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from manyheads.errors import UserError
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.attend import attention_weights
from manyheads.nn.positions import PositionSizes, Rotary
from manyheads.summary import count_parameters

SMALL = GptConfig(vocab_size=100, dim=64, layers=2, heads=4, max_length=32, dropout=0.0)
SENTENCES = (
    "This chocolate is delicious",
    "I think chocolate is delicious",
    "Most people know chocolate is delicious",
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One task of the worksheet. `check` gives whether it holds, and the numbers."""

    name: str
    task: str
    solve: tuple[str, ...]
    check: Callable[[], tuple[bool, str]]


def _stack() -> tuple[bool, str]:
    sizes = [count_parameters(replace(SMALL, layers=layers)) for layers in (1, 2, 6)]
    per_block = sizes[1] - sizes[0]
    even = sizes[2] - sizes[1] == 4 * per_block
    return even, f"{sizes} parameters with 1, 2 and 6 blocks: {per_block:,} for each block"


def _reach() -> tuple[bool, str]:
    """How far back the last output sees, when every block sees the last three tokens only."""
    reach = []
    for layers in (1, 2, 4):
        torch.manual_seed(1)
        config = replace(SMALL, layers=layers)
        model = _windowed(config)
        tokens = torch.randint(100, (1, 16))
        embedded: list[torch.Tensor] = []
        handle = model.embedding.register_forward_hook(
            lambda module, args, out, seen=embedded: (out.retain_grad(), seen.append(out))[1]
        )
        model(tokens)[0, -1].sum().backward()
        handle.remove()
        gradient = embedded[0].grad
        assert gradient is not None
        reach.append(16 - int((gradient[0].abs().sum(-1) > 0).int().argmax()))
    return reach == [3, 5, 9], f"1, 2 and 4 blocks of windows of 3 tokens see {reach} tokens"


def _windowed(config: GptConfig) -> Gpt:
    from manyheads.nn.local import Longformer

    return replace(config, attention=Longformer(window=2, globals=0)).build()


def _masks() -> tuple[bool, str]:
    torch.manual_seed(1)
    q = torch.randn(1, 1, 5, 16)
    weights = attention_weights(q, q, rule="causal")[0, 0]
    padding = torch.tensor([[True, True, True, False, False]])
    padded = attention_weights(q, q, real=padding)[0, 0]
    above, hidden = float(weights.triu(1).sum()), float(padded[:, 3:].sum())
    sums = bool(torch.allclose(weights.sum(-1), torch.ones(5)))
    return (
        above == hidden == 0 and sums,
        f"weight on later tokens {above:g} (causal mask), on padding {hidden:g} (padding mask); "
        "rows sum to 1",
    )


def _future() -> tuple[bool, str]:
    torch.manual_seed(1)
    model = SMALL.build().eval()
    tokens = torch.randint(100, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 100
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    early = float((before - after)[0, :5].abs().max())
    late = float((before - after)[0, 5:].abs().max())
    text = f"other tokens from 6 on change the logits of tokens 1 to 5 by {early:g}, of 6 to 8 by"
    return early == 0 < late, f"{text} {late:.2f}"


def _rotary() -> tuple[bool, str]:
    """The cosine of the rotated vectors of "chocolate" and "delicious", which are 2 apart."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    torch.manual_seed(1)
    vectors = dict(zip(words, torch.randn(len(words), 64, dtype=torch.float64), strict=True))
    sizes = PositionSizes(dim=64, heads=1, head_dim=64, max_length=16, causal=False)
    rotary = Rotary().build(sizes)
    cosines = []
    for sentence in SENTENCES:
        x = torch.stack([vectors[word] for word in sentence.split()])[None, None]
        rotated = rotary.rotate(x, torch.arange(x.shape[2])[None])[0, 0]
        at = sentence.split().index("chocolate")
        cosines.append(float(torch.cosine_similarity(rotated[at], rotated[at + 2], dim=0)))
    spread = max(cosines) - min(cosines)
    shown = ", ".join(f"{cosine:.6f}" for cosine in cosines)
    return spread < 1e-12, f"cosines {shown} at positions 2-4, 3-5 and 4-6: {spread:.1g} apart"


def _hugging_face() -> tuple[bool, str]:
    from manyheads.exchange.huggingface import from_huggingface, to_huggingface

    torch.manual_seed(1)
    ours: Any = replace(_gpt2(), vocab_size=100).build().eval()
    theirs = to_huggingface(ours)
    back = from_huggingface(theirs).eval()
    tokens = torch.randint(100, (2, 12))
    with torch.no_grad():
        logits, foreign, again = ours(tokens), theirs(tokens).logits, back(tokens)
    difference = float((logits - foreign).abs().max())
    same = bool(torch.equal(logits, again))
    text = f"{type(theirs).__name__}: logits differ by {difference:.1g}; imported again, they are"
    return difference < 1e-5 and same, f"{text} {'the same bits' if same else 'not the same'}"


def _gpt2() -> GptConfig:
    from manyheads.config import change
    from manyheads.presets import preset

    sizes = {"dim": 64, "layers": 2, "heads": 4, "max_length": 32}
    config = change(preset("gpt3-small"), sizes)
    assert isinstance(config, GptConfig)
    return config


STEPS = (
    Step(
        name="stack",
        task="Stack blocks. What does one more block cost?",
        solve=("manyheads info gpt3-small layers=1", "manyheads info gpt3-small layers=2"),
        check=_stack,
    ),
    Step(
        name="reach",
        task="Give each block a window of 3 tokens. How far does a stack see?",
        solve=(
            "manyheads train shakespeare-char model.attention=longformer "
            "model.attention.window=2 model.attention.globals=0",
        ),
        check=_reach,
    ),
    Step(
        name="masks",
        task="Mask the future and mask padding. Which weights are 0?",
        solve=(
            "q = torch.randn(1, 1, 5, 16)",
            "manyheads.attention_weights(q, q, rule='causal')",
            "manyheads.attention_weights(q, q, real=torch.tensor([[True] * 3 + [False] * 2]))",
        ),
        check=_masks,
    ),
    Step(
        name="future",
        task="Change the last words of a text. Which predictions of a language model change?",
        solve=("model(tokens)[:, :5] == model(changed)[:, :5]",),
        check=_future,
    ),
    Step(
        name="rotary",
        task='Rotate the vectors of "chocolate" and "delicious" in three sentences. '
        "What is their cosine?",
        solve=(
            "rotary = Rotary().build(sizes)",
            "rotated = rotary.rotate(x, torch.arange(x.shape[2])[None])",
        ),
        check=_rotary,
    ),
    Step(
        name="hugging-face",
        task="Take a model to Hugging Face and back. Are its predictions the same?",
        solve=(
            "theirs = manyheads.to_huggingface(model)",
            "back = manyheads.from_huggingface(theirs)",
            "manyheads export RUN --to huggingface --out FOLDER",
            "manyheads import FOLDER --out RUN",
        ),
        check=_hugging_face,
    ),
)


def check_steps(write: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run every step of the worksheet; a step whose library is missing is not checked."""
    for number, step in enumerate(STEPS, start=1):
        holds: bool | None
        try:
            holds, numbers = step.check()
        except UserError as error:  # an optional library is missing
            holds, numbers = None, str(error)
        mark = {True: "checked", False: "FAILED", None: "not checked"}[holds]
        lines = "".join(f"     {line}\n" for line in step.solve)
        write(f"{number}. {step.task}\n{lines}   {mark}: {numbers}\n\n")
        row = {"name": step.name, "task": step.task, "solve": step.solve}
        yield row | {"holds": holds, "numbers": numbers}
