"""examples/transformer.py, the Transformer in one file, computes what the package computes."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import manyheads

FILE = Path(__file__).parents[2] / "examples" / "transformer.py"
SIZES = {"vocab_size": 300, "dim": 16, "heads": 2, "layers": 2, "ffn_dim": 32}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_transformer", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package_state(theirs: nn.Module) -> dict[str, Tensor]:
    """The weights of the one-file model under the names of the package."""
    parts = {
        "attention.project": ["attention.q", "attention.k", "attention.v"],
        "attention.output": ["attention.out"],
        "cross.query": ["cross.q"],
        "cross.project": ["cross.k", "cross.v"],
        "cross.output": ["cross.out"],
        "feedforward.inner": ["feedforward.0"],
        "feedforward.outer": ["feedforward.2"],
    }
    stored = theirs.state_dict()
    state = {"tokens.weight": stored["embedding.weight"]}
    for stack, norms in (
        ("encoder", ("attention", "feedforward")),
        ("decoder", ("attention", "cross", "feedforward")),
    ):
        for leaf in ("weight", "bias"):
            state[f"{stack}.last_norm.{leaf}"] = stored[f"{stack}_norm.{leaf}"]
            for layer in range(SIZES["layers"]):
                ours, prefix = f"{stack}.blocks.{layer}", f"{stack}.{layer}"
                for number, name in enumerate(norms):
                    norm = stored[f"{prefix}.norms.{number}.{leaf}"]
                    state[f"{ours}.{name}_residual.norm.{leaf}"] = norm
                for name, sources in parts.items():
                    if f"{prefix}.{sources[0]}.{leaf}" in stored:
                        tensors = [stored[f"{prefix}.{source}.{leaf}"] for source in sources]
                        state[f"{ours}.{name}.{leaf}"] = torch.cat(tensors)
    return state


@pytest.fixture
def pair(example: ModuleType) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    theirs = example.Transformer(**SIZES)
    for parameter in theirs.parameters():  # biases and norms away from their initial values
        nn.init.normal_(parameter, std=0.3)
    ours = manyheads.build("transformer-base", **SIZES, norm="pre", dropout=0.0).eval()
    ours.load_state_dict(package_state(theirs))
    return theirs.double(), ours.double()


def test_equal_logits_and_gradients(example: ModuleType, pair: tuple[nn.Module, nn.Module]) -> None:
    theirs, ours = pair
    source, target = torch.randint(3, 300, (3, 7)), torch.randint(3, 300, (3, 5))
    source[1, 4:] = source[2, 6:] = example.PAD
    results = theirs(source, target), ours(source, target, source != example.PAD)
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)
    for logits in results:
        logits.logsumexp(-1).sum().backward()
    torch.testing.assert_close(
        theirs.embedding.weight.grad, ours.tokens.weight.grad, rtol=0, atol=1e-9
    )


def test_equal_greedy_search(example: ModuleType, pair: tuple[nn.Module, nn.Module]) -> None:
    theirs, _ = pair
    random.seed(1)
    for _ in range(5):
        source = [random.randrange(3, 300) for _ in range(6)]
        text = [example.START]
        memory = theirs.encode(torch.tensor([source]))
        for _ in range(2 * len(source) + 9):
            text.append(int(theirs.decode(torch.tensor([text]), *memory)[0, -1].argmax()))
            if text[-1] == example.END:
                text.pop()
                break
        assert example.translate(theirs, source, beam=1) == text[1:]
