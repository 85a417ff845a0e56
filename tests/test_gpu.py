"""Tests that need a GPU; run with `make test-gpu`.

Kernels and fused modules are compared with float64. Compilation takes most of the time, so sizes
repeat those of the self-tests where any size would do: the kernels are then compiled already.
"""

import copy
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.cases import CASES as KERNELS
from tests.kernels.cases import ON_GPU, worst_error
from tests.tasks.small_texts import CASES, WORDS, write_texts
from tests.train.small_runs import assert_same_bits, hurt
from torch import Tensor
from torch.nn import functional as F

from manyheads import ops, optimize
from manyheads.data.translation import PhrasebookData
from manyheads.decode.beam import Decode
from manyheads.decode.translate import Translator
from manyheads.kernels import attention, dispatch, linear_cross_entropy
from manyheads.kernels.attention import AttentionCall
from manyheads.kernels.dispatch import first_supported, verified
from manyheads.kernels.selftest import relative_error
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attend import attend
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Stack
from manyheads.nn.layers import Norm, Plain, Residual
from manyheads.nn.masks import Both, SameDocument, Window, causal, full, make_mask
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    NoPosition,
    Position,
    PositionSizes,
    Rotary,
    Sinusoidal,
)
from manyheads.optimize import fused as fused_modules
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.tokenizer.train import Bpe
from manyheads.train import cuda_graphs
from manyheads.train.loop import Trainer
from manyheads.train.step import cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave everything to PyTorch's own operations."""
    for module in (dispatch, linear_cross_entropy, ops, optimize, fused_modules):
        monkeypatch.setattr(module, "runs_triton", lambda x: False)


def assert_close(
    results: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-2
) -> None:
    """Relative errors, as norms."""
    errors = [relative_error(x, y) for x, y in zip(results, expected, strict=True)]
    assert max(errors) < tolerance, errors


def count_calls(monkeypatch: pytest.MonkeyPatch, *kernels: tuple[str, str]) -> list[str]:
    """A list that gets the name of a kernel at every eager call, of (module, name)."""
    calls: list[str] = []

    def count(kernel: Any, name: str) -> Any:
        return lambda *args: (calls.append(name), kernel(*args))[1]

    for module_name, name in kernels:
        module: Any = importlib.import_module(f"manyheads.kernels.{module_name}")
        monkeypatch.setattr(module, name, count(getattr(module, name), name))
    return calls


# Kernels


def test_kernels_pass_their_selftests() -> None:
    index = torch.cuda.current_device()
    assert [name for name in KERNELS if not verified(name, index)] == []


@pytest.mark.parametrize("name", ON_GPU)
def test_kernels_equal_their_formulas(name: str) -> None:
    for sizes in ON_GPU[name]:
        assert worst_error(name, sizes, "cuda", BF16) < 0.02, sizes
    if name in ("short_attention", "layer_norm"):
        assert worst_error(name, ON_GPU[name][0], "cuda", torch.float16) < 0.005


POSITIONS = {config.kind: config for config in (NoPosition(), Rotary(), Buckets(), Alibi())}
ATTENTIONS: list[tuple[str, Any, torch.dtype]] = [
    *[(name, rule, BF16) for name in POSITIONS for rule in (full, causal, Window(3))],
    *[(name, causal, torch.float32) for name in POSITIONS],
    ("none", "documents", torch.float32),
]


@pytest.mark.parametrize(("name", "rule", "dtype"), ATTENTIONS)
def test_fused_attention_equals_dense(name: str, rule: Any, dtype: torch.dtype) -> None:
    """Outputs and gradients, the second sequence padded."""
    length = 70
    q, k, v = torch.randn(3, 2, 2, length, 32, device=CUDA, dtype=dtype)
    if rule == "documents":
        documents = torch.arange(length, device=CUDA).expand(2, -1) // 50
        rule = Both(causal, SameDocument(documents))
    real = torch.arange(length, device=CUDA) < torch.tensor([[length], [41]], device=CUDA)
    sizes = PositionSizes(dim=64, heads=2, head_dim=32, max_length=length, causal=rule.is_causal)
    position = POSITIONS[name].build(sizes).to(q)

    def run(core: str, position: Position, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, rule=rule, real=real, position=position, core=core)
        out = out * real[:, None, :, None]  # outputs at padding may not be computed
        grad = torch.linspace(-1, 2, 32, device=CUDA, dtype=out.dtype).expand_as(out)
        return [out, *torch.autograd.grad(out, [*inputs, *weights(position)], grad)]

    def weights(position: Position) -> list[Tensor]:
        """In bfloat16, PyTorch's own sum over all pairs is not exact enough."""
        return [] if name == "t5" and q.dtype == BF16 else [*position.parameters()]

    expected = run("dense", copy.deepcopy(position).double(), torch.float64)
    tolerance = 3e-2 if dtype == BF16 else 5e-3
    assert_close(run("fused", position, dtype), expected, tolerance)


def test_the_kernel_for_the_call_is_chosen() -> None:
    def chosen(queries: int, width: int = 32, dropout: float = 0.0) -> str | None:
        q, k, v = (torch.randn(2, 4, n, width, device=CUDA, dtype=BF16) for n in (queries, 70, 70))
        mask = make_mask(causal, queries, start=70 - queries, device=CUDA)
        call = AttentionCall(q, k, v, mask, None, None, 0.125, dropout)
        return first_supported(attention.ATTENTION, call, q).kernel

    assert chosen(1) is None  # with gradients
    with torch.no_grad():
        assert chosen(1) == "decode_attention"
        assert chosen(1, width=48) is chosen(1, dropout=0.1) is chosen(70) is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_output_layer_and_loss(smoothing: float) -> None:
    classes, single = 1000, torch.float32
    hidden, matrix = (torch.randn(n, 64, device=CUDA) for n in (300, classes))
    labels = torch.randint(classes, (300,), device=CUDA)
    counts = torch.arange(300, device=CUDA) % 7 > 0
    for *dtypes, tolerance in ((single, single, 1e-4), (BF16, BF16, 2e-2), (BF16, single, 2e-2)):
        inputs = [
            x.to(dtype).requires_grad_() for x, dtype in zip((hidden, matrix), dtypes, strict=True)
        ]
        loss = cross_entropy(*inputs, labels, smoothing=smoothing, loss_mask=counts).objective
        exact = [x.detach().double().requires_grad_() for x in inputs]
        expected = F.cross_entropy(
            (exact[0] @ exact[1].T)[counts], labels[counts],
            label_smoothing=smoothing, reduction="sum",
        )  # fmt: skip
        assert_close(
            [loss, *torch.autograd.grad(loss, inputs)],
            [expected, *torch.autograd.grad(expected, exact)],
            tolerance,
        )


# Fused modules


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_fused_stack_is_as_near_to_float64_as_a_plain_one(
    placement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short and long sequences, eager and compiled.

    Half precision takes some numbers over the edge of a ReLU, so that its gradients are some
    hundredths off with any kernel.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    config = Seq2SeqConfig(
        vocab_size=10, dim=96, layers=1, heads=3, dropout=0.0, norm=Norm(placement=placement),
        feedforward=Plain(activation="gelu-tanh" if placement == "pre" else "relu"),
        position=Rotary() if placement == "pre" else Sinusoidal(), max_length=200,
    )  # fmt: skip
    plain = Stack(config, causal=True).cuda().train()
    exact, fused = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    optimize.optimize(fused)
    compiled = copy.deepcopy(fused)
    optimize.compile_blocks(compiled)

    def results(stack: Stack, x: Tensor, grad: Tensor) -> list[Tensor]:
        inputs = x.to(torch.float64 if stack is exact else BF16).requires_grad_()
        with torch.autocast("cuda", BF16, enabled=stack is not exact):
            out = stack(inputs, make_mask(causal, x.shape[1], device=CUDA))
        return [out, *torch.autograd.grad(out, [inputs, *stack.parameters()], grad.to(out.dtype))]

    for length in (40,) if placement == "pre" else (40, 200):
        x, grad = torch.randn(2, 3, length, 96, device=CUDA)
        with monkeypatch.context() as patch:
            calls = count_calls(
                patch,
                *(("layer_norm", "prenorm"), ("layer_norm", "add_norm"), ("mlp", "fused_mlp")),
                ("short_attention", "short_attention"),
            )
            ours = [results(fused, x, grad)]
            norms = ["prenorm"] * 3 if placement == "pre" else ["add_norm"] * 2
            is_short = placement == "post" and length == 40  # nothing is rotated
            assert sorted(calls) == sorted(["fused_mlp", *norms, *["short_attention"] * is_short])
        ours.append(results(compiled, x, grad))
        with monkeypatch.context() as patch:
            without_kernels(patch)
            theirs, expected = results(plain, x, grad), results(exact, x, grad)
        for result in ours:
            for value, other, reference in zip(result, theirs, expected, strict=True):
                limit = max(1.25 * relative_error(other, reference), 0.02)
                assert relative_error(value, reference) < limit
    assert not counters["graph_break"]


@pytest.mark.parametrize("cross", [False, True])
def test_attention_with_dropout_has_the_mean_of_attention_without(
    cross: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients; no two calls are equal."""
    config = Seq2SeqConfig(vocab_size=10, dim=64, heads=2, attention_dropout=0.2)
    heads = config.attention_config()
    module: Any = CrossAttention(heads, 64) if cross else SelfAttention(heads)
    module.cuda().bfloat16()
    optimize.optimize(module)
    memory = torch.randn(5, 30, 64, device=CUDA, dtype=BF16)
    x, grad = torch.randn(2, 5, 40 if cross else 30, 64, device=CUDA).bfloat16()
    real = torch.arange(30, device=CUDA) < torch.tensor([[30], [7], [1], [29], [30]]).cuda()
    mask = make_mask(full, 30, padding_mask=real, device=CUDA)
    inputs = (memory, mask) if cross else (mask, Position())
    calls = count_calls(monkeypatch, ("short_attention", "short_attention"))

    def sample() -> list[Tensor]:
        out = module(x, *inputs)
        grads = torch.autograd.grad(out, [*module.parameters()], grad)
        return [part.detach().float() for part in (out, *grads)]

    samples = [sample() for _ in range(200)]
    assert not torch.equal(samples[0][0], samples[1][0])
    module.eval()
    expected = sample()
    assert len(calls) == 201
    means = [torch.stack(parts).mean(0) for parts in zip(*samples, strict=True)]
    assert_close(means, expected, 0.15)


def test_compiled_residual_dropout_is_the_same_in_both_passes() -> None:
    """The gradient of f is zero where f was dropped; another call drops something else."""
    torch._dynamo.reset()
    residual = Residual(48, Norm(placement="post"), 0.25).cuda().train()
    optimize.optimize(residual)
    call: Any = torch.compile(residual, fullgraph=True)
    f = torch.randn(70, 48, device=CUDA, dtype=BF16, requires_grad=True)
    x, masks = torch.zeros_like(f), []
    for _ in range(2):
        with torch.autocast("cuda", BF16):
            out = call(x, lambda _: f)
        [grad] = torch.autograd.grad(out, f, torch.randn_like(out))
        masks.append(grad != 0)
        assert_close([out], [F.layer_norm(f.double() * masks[-1] / 0.75, (48,))])
        assert abs(float(masks[-1].double().mean()) - 0.75) < 0.04
    assert not torch.equal(masks[0], masks[1])


# Training and decoding


def test_a_translator_learns_with_kernels_and_resumes(tmp_path: Path) -> None:
    """Short and long sentences, dropout everywhere: the loss shows that gradients are right."""
    settings = [
        "model.dim=128", "model.layers=2", "model.heads=4", "model.dropout=0.1",
        "model.attention_dropout=0.1", "model.norm=post", "train.learning_rate=2e-3",
        "train.compile=no", "train.validate_every=300", "decode.bleu_sentences=0",
    ]  # fmt: skip
    for steps in (30, 300):
        run = read_recipe("phrasebook", [*settings, f"train.steps={steps}"])
        trainer = make_trainer(run, tmp_path, CUDA)
        assert trainer.dtype == BF16
        parts = trainer.model.modules()
        assert any(isinstance(part, fused_modules.FusedResidual) for part in parts)
        trainer.run()
        assert trainer.progress.step == steps
    assert trainer.task.validate(trainer.model)["loss"] < 2.5  # of 6.9 at the start


@pytest.mark.parametrize("name", ["causal stream", "masked pairs"])
def test_pretraining_in_bfloat16_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    case, texts = CASES[name], write_texts(tmp_path / "texts", documents=200)
    sizes = ("model.dim=64", "model.heads=4", "model.max_length=64")

    def trainer(out: str) -> Trainer:
        run = read_recipe(case.recipe, [*case.all(texts), *sizes])
        return make_trainer(run, tmp_path / out, CUDA)

    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    complete, killed = trainer("complete"), trainer("killed")
    assert complete.dtype == BF16
    complete.run()
    hurt(killed, 10, kill)
    with pytest.raises(Killed):
        killed.run()
    resumed = trainer("killed")
    assert resumed.progress.step == 8
    resumed.run()
    assert_same_bits(tmp_path / "killed", tmp_path / "complete")


def test_bidirectional_language_models_train(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", documents=200)
    settings = ["model.dim=16", "model.max_length=32", "train.steps=6", "train.batch_tokens=256"]
    settings += ["train.warmup_steps=2"]
    run = read_recipe("elmo-mini", [f"data.folder={texts}", WORDS, *settings])
    assert make_trainer(run, tmp_path / "run", CUDA).run().step == 6


def trained_weights(
    run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> dict[str, Tensor]:
    """After training with CUDA graphs from the second pass of a shape on, or never."""
    monkeypatch.setattr(cuda_graphs, "WARMUP", 1 if graphs else 10**9)
    trainer = make_trainer(run, folder, CUDA)
    assert isinstance(trainer.forward_backward, cuda_graphs.CudaGraphs)
    trainer.run()
    assert bool(trainer.forward_backward.graphs) == graphs
    return trainer.model.state_dict()


TRANSLATORS: dict[str, list[str]] = {
    "translation": [],
    "experts": ["model.feedforward=experts"],
    "decoder-only": ["model=joined", "model.attention=memory-compressed"],
}
# One for each kind of model, batch and loss.
GRAPHED = ["causal documents", "masked pairs", "replaced", "spans", "labels", "pictures"]


@pytest.mark.parametrize("name", [*GRAPHED, *TRANSLATORS])
def test_cuda_graphs_train_as_eager_passes_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in CASES:
        case = CASES[name]
        texts = write_texts(tmp_path / "data")
        folder = texts / {"classify": "tables", "images": "pictures"}.get(case.recipe, "")
        run = read_recipe(case.recipe, [*case.all(folder), "train.steps=24"])
    else:
        small = ["model.dim=16", "model.layers=1", "model.heads=2", "data.train_pairs=300"]
        small += ["data.valid_pairs=9", "train.steps=40", "train.warmup_steps=9"]
        small += ["train.batch_tokens=900", "decode.bleu_sentences=0"]
        run = read_recipe("phrasebook", [*TRANSLATORS[name], *small])
    eager, graphed = (
        trained_weights(run, tmp_path / str(graphs), monkeypatch, graphs)
        for graphs in (False, True)
    )
    for key, weight in eager.items():
        # In bfloat16 atomic additions in another order may change a rounding.
        torch.testing.assert_close(graphed[key], weight, rtol=2e-2, atol=4e-3, msg=key)


def test_beam_search_equals_the_cpu() -> None:
    corpus = PhrasebookData(train_pairs=500, test_pairs=40).read("train")
    tokenizer = Bpe(vocab_size=600).train([*corpus.sources, *corpus.targets])
    model = Seq2SeqConfig(vocab_size=tokenizer.vocab_size, dim=32, layers=1, heads=2).build()
    decode = Decode(beam=3)
    on_cpu = Translator(model, tokenizer, decode).search(corpus.sources[:40])
    on_gpu = Translator(model.double().cuda(), tokenizer, decode).search(corpus.sources[:40])
    same = sum(a[0].tokens == b[0].tokens for a, b in zip(on_cpu, on_gpu, strict=True))
    assert same >= 38  # float32 against float64: a tie may fall the other way
