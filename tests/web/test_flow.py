"""The Flow page's numbers: each shown part follows from those shown before it, by the formula."""

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import einsum, rearrange
from starlette.testclient import TestClient
from tests.web.test_server import ask, problem, tensor
from torch import Tensor

from manyheads.baselines.rnn import RnnConfig
from manyheads.loading import LoadedRun
from manyheads.models.bert import BertConfig
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2SeqConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify, Detect
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import Dense, SelfAttention, dense_weights
from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.experts import Experts
from manyheads.nn.layers import EmbeddingConfig, Gated, Norm
from manyheads.nn.linformer import Linformer
from manyheads.nn.positions import Alibi, Buckets, Learned, Relative, Rotary, Shaw
from manyheads.nn.scores import Additive, Dot
from manyheads.run import Run, save_run
from manyheads.tasks.table import TASKS
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Words
from manyheads.web.app import build_app
from manyheads.web.flow import MOST_TOKENS, follow, source
from manyheads.web.forward import SizeLimit
from manyheads.web.guard import Limits
from manyheads.web.provenance import Cell, provenance, written
from manyheads.web.trace import stacks
from manyheads.web.traces import Trace

TEXT, TARGET = "one two three four two", "five six one"
ROOM = SizeLimit(64, 2**24)
SIZES: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 4, "ffn_dim": 24, "max_length": 300}
POST = Norm(placement="post")
MODELS: dict[str, Any] = {
    "seq2seq": Seq2SeqConfig(**SIZES),
    "seq2seq-post": Seq2SeqConfig(**SIZES, norm=POST, position=Buckets(), score=Dot()),
    "seq2seq-sizes": Seq2SeqConfig(**SIZES, tie="target", embed=EmbeddingConfig(scale="sqrt-dim")),
    "joined": DecoderOnlySeq2SeqConfig(**SIZES),
    "gpt-rotary": GptConfig(
        **SIZES,
        kv_heads=2,
        position=Rotary(),
        norm=Norm(form="rms"),
        feedforward=Gated(),
        bias=False,
    ),
    "gpt-shaw": GptConfig(**SIZES, position=Shaw(), attention=Dense(), score=Additive()),
    "gpt-alibi": GptConfig(**SIZES, position=Alibi(), feedforward=Experts(experts=3)),
    "gpt-relative": GptConfig(**SIZES, position=Relative(), norm=POST),
    "bert": BertConfig(
        **SIZES,
        norm=POST,
        position=Learned(),
        embed=EmbeddingConfig(norm=Norm(), segments=2, dim=8),
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Words().train(["one two three four five six seven eight nine ten eleven"])


def opened(config: Any, tokenizer: Tokenizer, folder: Path = Path()) -> LoadedRun:
    torch.manual_seed(2)
    inputs = {"vocab_size": tokenizer.vocab_size, "dropout": 0.0}
    config = type(config)(**{**vars(config), **inputs})
    run = Run(task=TASKS.default(config), data=None, tokens=None, model=config)
    model = config.build().eval()
    for one in model.parameters():  # norms and biases that do something
        if one.ndim == 1:
            torch.nn.init.normal_(one, mean=1.0, std=0.3)
    return LoadedRun(folder, run, tokenizer, torch.device("cpu"), model=model)


def followed(run: LoadedRun) -> Trace:
    target = TARGET if run.run.model.kind in ("seq2seq", "decoder-only-seq2seq") else None
    return follow(run, TEXT, target, ROOM, {})


def near(inputs: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(inputs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_scores_and_mask_make_weights_and_weights_mix_values(
    name: str, tokenizer: Tokenizer
) -> None:
    run = opened(MODELS[name], tokenizer)
    actual = followed(run).tensors
    for stack, _, module in stacks(run.model):
        for kind in ("self", "cross"):
            if f"{stack}.{kind}.q" not in actual:
                continue
            part = {
                what.rpartition(".")[2]: actual[what]
                for what in actual
                if what.startswith(f"{stack}.{kind}.")
            }
            mask = part["mask"][:, None] if "mask" in part else torch.zeros(1)
            masked = part["scores"] + part.get("bias", 0) + mask
            near(part.get("masked", part["scores"]), masked)
            near(part["weights"], masked.softmax(-1))
            mixed = einsum(part["weights"], part["v"], "l h t s, l h s c -> l h t c")
            near(part["mix"], mixed + part.get("spread", 0))
            assert ("mask" in part) == (stack == "decoder" and kind == "self")
            assert ("bias" in part) == (
                kind == "self"
                and run.run.model.position.kind in ("t5", "shaw", "alibi", "relative")
            )
            for layer, block in enumerate(module.blocks):
                attention: Any = block.attention if kind == "self" else block.cross
                joined = rearrange(part["mix"][layer], "h t c -> t (h c)")
                near(part["output"][layer], attention.output(joined))
                score = attention.score(part["q"][layer][None], part["k"][layer][None])[0]
                near(part["scores"][layer], score)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_sum_is_what_came_in_and_what_the_part_gave(name: str, tokenizer: Tokenizer) -> None:
    """x + output = sum, the norm before or after it, from the embeddings to the head."""
    run = opened(MODELS[name], tokenizer)
    actual = followed(run).tensors
    pre = run.run.model.norm.placement == "pre"
    for stack, embedding, module in stacks(run.model):
        x = actual[f"{stack}.embedding"] + actual.get(f"{stack}.position", 0)
        x = embedding.project(embedding.norm(x + actual.get(f"{stack}.segment", 0)))
        near(actual[f"{stack}.input"], x)
        for layer, block in enumerate(module.blocks):
            near(actual[f"{stack}.layer.input"][layer], x)
            residuals = {
                "self": block.attention_residual,
                "feedforward": block.feedforward_residual,
            }
            if f"{stack}.cross.sum" in actual:
                residuals = {
                    "self": block.attention_residual,
                    "cross": block.cross_residual,
                    **residuals,
                }
            for kind in sorted(residuals, key=["self", "cross", "feedforward"].index):
                total = actual[f"{stack}.{kind}.sum"][layer]
                near(total, x + actual[f"{stack}.{kind}.output"][layer])
                normed = actual[f"{stack}.{kind}.norm"][layer]
                near(normed, residuals[kind].norm(x if pre else total))
                x = total if pre else normed
            if f"{stack}.feedforward.hidden" in actual:
                inside = actual[f"{stack}.feedforward.hidden"][layer]
                near(actual[f"{stack}.feedforward.output"][layer], block.feedforward.outer(inside))
        if pre:
            near(actual[f"{stack}.states"], module.last_norm(x))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_terms_of_a_cell_add_up_to_its_number(name: str, tokenizer: Tokenizer) -> None:
    run = opened(MODELS[name], tokenizer)
    trace = followed(run)
    explained = set()
    for box, values in trace.tensors.items():
        layered = box.count(".") == 2
        row, column = values.shape[-2] - 1, 1
        terms = provenance(trace, run.model, Cell(box, 1, 2, row, column))
        number = values[1] if layered else values
        number = number[2] if number.ndim == 3 else number
        if "total" not in terms:
            continue
        explained.add(box)
        parts = [item["value"] for item in (*terms["terms"], terms["others"], *terms["added"])]
        near(torch.tensor(sum(parts)), torch.tensor(terms["sum"]))
        assert terms["total"] == pytest.approx(float(number[row, column]), abs=1e-5), box
    last = trace.manifest["columns"][-1]["name"]
    expected = {f"{last}.self.{what}" for what in ("v", "weights", "mix", "output", "norm", "sum")}
    assert expected <= explained


@torch.no_grad()
def test_the_bus_is_as_wide_as_the_residual_stream(tokenizer: Tokenizer) -> None:
    trace = followed(opened(MODELS["seq2seq-post"], tokenizer))
    for column in trace.manifest["columns"]:
        for name, norms in column["norms"].items():
            near(torch.tensor(norms), trace.tensors[name].norm(dim=-1).mean(-1).reshape(-1))
        assert column["stream"][1] == f"{column['name']}.self.norm"


@torch.no_grad()
def test_queries_are_projected_from_the_shown_norm(tokenizer: Tokenizer) -> None:
    run = opened(MODELS["seq2seq"], tokenizer)
    actual = followed(run).tensors
    attention = run.model.decoder.blocks[1].attention  # type: ignore[union-attr, index]
    assert isinstance(attention, SelfAttention)
    inputs = attention.project(actual["decoder.self.norm"][1]).chunk(3, -1)
    for what, one in zip("qkv", inputs, strict=True):
        near(actual[f"decoder.self.{what}"][1], rearrange(one, "t (h c) -> h t c", h=4))


@pytest.mark.parametrize("name", ["seq2seq", "joined", "gpt-rotary", "bert"])
@torch.no_grad()
def test_the_likeliest_tokens_are_those_of_the_model(name: str, tokenizer: Tokenizer) -> None:
    run = opened(MODELS[name], tokenizer)
    trace = followed(run)
    columns = trace.manifest["columns"]
    ids = [torch.tensor([one["ids"]]) for one in columns]
    if name == "joined":
        ids = [ids[0][:, :-4], ids[0][:, -4:]]
    chances = run.model(*ids)[0].softmax(-1)
    stack, box = columns[-1]["name"], columns[-1]["boxes"][-1]
    best, tokens = chances.topk(10)
    near(trace.tensors[f"{stack}.distribution"], best)
    near(trace.tensors[f"{stack}.logits"].softmax(-1), best / best.sum(-1, keepdim=True))
    assert [list(row) for row in box["words"]] == [
        tokenizer.subwords(row) for row in tokens.tolist()
    ]
    assert box["shape"] == list(chances.shape)
    assert list(box["rows"]) == tokenizer.subwords(ids[-1][0].tolist())


def test_heads_of_an_encoder_are_shown(tokenizer: Tokenizer) -> None:
    labelled = BertConfig(**SIZES, head=Classify(labels=("good", "bad", "neither")))
    trace = follow(opened(labelled, tokenizer), TEXT, None, ROOM, {})
    assert trace.tensors["encoder.distribution"].shape == (1, 3)
    near(trace.tensors["encoder.distribution"].sum(), torch.tensor(1.0))
    detects = follow(opened(BertConfig(**SIZES, head=Detect()), tokenizer), TEXT, None, ROOM, {})
    shares = detects.tensors["encoder.logits"].sigmoid()
    near(detects.tensors["encoder.distribution"], shares)
    bare = follow(opened(BertConfig(**SIZES, head=None), tokenizer), TEXT, None, ROOM, {})
    assert bare.manifest["columns"][0]["boxes"][-1]["name"] == "encoder.states"


def test_a_core_that_has_no_such_scores_shows_none(tokenizer: Tokenizer) -> None:
    """Weights and mix are still its own; layers without a common shape are left out."""
    config = BertConfig(**SIZES, attention=Linformer(rank=3))
    actual = follow(opened(config, tokenizer), TEXT, None, ROOM, {}).tensors
    assert actual["encoder.self.weights"].shape[-1] == 3
    assert not {"encoder.self.scores", "encoder.self.mask"} & actual.keys()
    mixed = GptConfig(**SIZES, attention=MemoryCompressed())
    actual = follow(opened(mixed, tokenizer), TEXT, None, ROOM, {}).tensors
    assert actual["decoder.self.mix"].shape == (2, 4, 5, 4)


def test_looking_changes_nothing(tokenizer: Tokenizer) -> None:
    run = opened(MODELS["gpt-shaw"], tokenizer)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.no_grad():
        before = run.model(ids)
        followed(run)
        assert torch.equal(run.model(ids), before)
    assert not any(module._forward_hooks for module in run.model.modules())


def test_code_is_the_text_of_our_own_functions(tokenizer: Tokenizer) -> None:
    reported = followed(opened(MODELS["seq2seq"], tokenizer)).manifest
    boxes = [box for column in reported["columns"] for box in column["boxes"]]
    assert {name for box in boxes for name in box["code"]} == reported["code"].keys()
    assert all(box["code"] and box["formula"] for box in boxes)
    assert all(name.startswith("manyheads.") for name in reported["code"])
    assert all(one["at"].startswith("manyheads/") for one in reported["code"].values())
    assert reported["code"]["manyheads.nn.attention.dense_weights"] == source(dense_weights)
    at, text = source(dense_weights).values()
    path, _, line = at.rpartition(":")
    lines = Path(inspect.getfile(inspect.unwrap(dense_weights))).read_text().splitlines()
    assert path == "manyheads/nn/attention.py"
    assert text.splitlines()[-1] in lines
    assert lines[int(line) - 1].startswith("def dense_weights")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> TestClient:
    folder = tmp_path_factory.mktemp("runs")
    for name, config in (("writer", MODELS["gpt-rotary"]), ("old", RnnConfig(dim=8, layers=1))):
        run = opened(config, tokenizer)
        save_run(run.run, tokenizer, run.model, folder / name)
    return TestClient(build_app(folder, limits=Limits(trace_bytes=2**20)), "http://localhost")


def test_a_box_is_asked_for_by_layer_and_head(client: TestClient) -> None:
    reported = ask(client, "/api/flow", run="writer", text=TEXT)
    masked = tensor(client, reported["trace"], "decoder.self.masked", layer=1, head=2)
    assert masked.shape == (5, 5)
    assert (masked == -math.inf).sum() == 10
    weights = tensor(client, reported["trace"], "decoder.self.weights", layer=1, head=2)
    near(weights, masked.softmax(-1))
    assert tensor(client, reported["trace"], "decoder.embedding").shape == (5, 16)
    again = ask(client, "/api/flow", run="writer", text=TEXT)
    assert again["trace"] == reported["trace"]
    other = ask(client, "/api/flow", run="writer", text="one")
    assert other["trace"] != reported["trace"]


def test_all_boxes_of_a_layer_and_head_come_in_one_answer(client: TestClient) -> None:
    reported = ask(client, "/api/flow", run="writer", text=TEXT)
    names = [box["name"] for box in reported["columns"][0]["boxes"]][1:]
    answer = client.get(f"/api/flow/{reported['trace']}/boxes", params={"layer": 1, "head": 3})
    shapes = [tuple(map(int, one.split(","))) for one in answer.headers["x-shape"].split(";")]
    numbers = torch.from_numpy(np.frombuffer(answer.content, "<f4").copy())
    actual = numbers.split([math.prod(shape) for shape in shapes])
    for name, shape, values in zip(names, shapes, actual, strict=True):
        which = {"layer": 1} if name.count(".") == 2 else {}
        if which and tensor(client, reported["trace"], name).ndim == 4:
            which["head"] = 3
        assert torch.equal(values.view(shape), tensor(client, reported["trace"], name, **which)), (
            name
        )
    problem(client.get(f"/api/flow/{reported['trace']}/boxes?layer=x"), 400)
    problem(client.get("/api/flow/nothing/boxes"), 404)
    other = ask(client, "/api/trace", run="writer", text=TEXT)
    assert "/api/flow" in problem(client.get(f"/api/flow/{other['trace']}/boxes"), 404)


def test_what_cannot_be_followed_is_refused(client: TestClient) -> None:
    def requested(**body: Any) -> Any:
        return client.post("/api/flow", json=body)

    assert "Transformer" in problem(requested(run="old", text=TEXT), 400)
    long = " ".join(["one"] * (MOST_TOKENS + 1))
    assert f"more than {MOST_TOKENS}" in problem(requested(run="writer", text=long), 413)
    assert "MiB" in problem(requested(run="writer", text=" ".join(["one"] * 200)), 413)
    problem(requested(run="nowhere", text=TEXT), 404)
    problem(requested(run="writer", text=3), 400)
    assert client.post("/api/flow", content="text").status_code == 415
    assert ask(client, "/api/flow", run="writer", text="")["columns"][0]["ids"]


@pytest.mark.parametrize(
    ("config", "formula"),
    [
        (GptConfig(**SIZES, residual="none"), "no residual connection"),
        (GptConfig(**SIZES, norm=Norm(affine=False)), "LayerNorm(x) = (x − μ) / √(σ² + ε)"),
        (Seq2SeqConfig(**SIZES, norm=Norm(placement="none")), "the model has no norms"),
    ],
)
@torch.no_grad()
def test_parts_that_are_switched_off_say_so(
    config: Any, formula: str, tokenizer: Tokenizer
) -> None:
    run = opened(config, tokenizer)
    trace = followed(run)
    boxes = [box for column in trace.manifest["columns"] for box in column["boxes"]]
    assert any(formula in box["formula"] for box in boxes)
    for name in ("sum", "norm"):
        terms = provenance(trace, run.model, Cell(f"decoder.self.{name}", 1, 2, 0, 1))
        number = float(trace.tensors[f"decoder.self.{name}"][1, 0, 1])
        assert terms.get("total", number) == pytest.approx(number, abs=1e-5)


def test_numbers_are_written_as_on_the_page() -> None:
    assert [written(x) for x in (1.46e-5, 0.0774, -2.0, 1.0)] == ["1.46e−5", "0.0774", "−2", "1"]
