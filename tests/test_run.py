"""A run: recipes round-trip, a folder rebuilds its model, conflicting settings are refused."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from manyheads.config import dump, parse, to_toml
from manyheads.errors import UserError
from manyheads.loading import load_torch_run
from manyheads.models.seq2seq import Seq2SeqConfig, StackOverrides
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense, Fused
from manyheads.nn.local import Longformer
from manyheads.nn.performer import Performer
from manyheads.nn.tiled import Tiled
from manyheads.recipes import read_recipe, recipes
from manyheads.run import Run, check_folder, make_trainer, model_digest, read_run
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.checkpoint import read_tensors

TINY = (
    *("data.train_pairs=30", "data.valid_pairs=2", "data.test_pairs=2", "tokens.vocab_size=300"),
    *("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn_dim=32", "train.steps=2"),
    *("train.warmup_steps=2", "train.validate_every=2", "decode.bleu_sentences=0"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tiny"
    run = read_recipe("phrasebook", [*TINY, "model.position=rotary", "seed=7"])
    make_trainer(run, out, torch.device("cpu")).run()
    return out


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_goes_there_and_back_and_builds(name: str) -> None:
    run = read_recipe(name)
    table = tomllib.loads(to_toml(dump(run)))
    assert table == dump(run)
    assert parse(Run, table) == run
    with torch.device("meta"):
        model = dataclasses.replace(run.model, vocab_size=1000).build()
    assert sum(p.numel() for p in model.parameters()) > 0
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_settings_on_top_of_a_recipe() -> None:
    assert "phrasebook" in recipes()
    run = read_recipe("phrasebook", ["model.dim=64", "model=rnn"])  # in whichever order
    assert (run.model.kind, run.model.dim) == ("rnn", 64)
    run = read_recipe("phrasebook", ["model.dim=64", "model.norm=post", "seed=3", "seed=4"])
    assert (run.model.dim, run.model.norm.placement, run.seed) == (64, "post", 4)
    plain = read_recipe("phrasebook")
    assert dataclasses.replace(run.model, dim=plain.model.dim, norm=plain.model.norm) == plain.model


def test_a_setting_switches_off_the_alternative_of_the_recipe() -> None:
    assert read_recipe("images").train.epochs is not None
    run = read_recipe("images", ["train.steps=9", "train.warmup_steps=2", "train.batch_tokens=50"])
    assert (run.train.epochs, run.train.warmup_ratio, run.train.batch_rows) == (None, None, None)
    assert "train.epochs" not in run.by_data  # the amount of data would bring it back


def test_the_folder_holds_the_run_and_rebuilds_its_model(folder: Path) -> None:
    run = read_run(folder)
    requested = read_recipe("phrasebook", [*TINY, "model.position=rotary", "seed=7"])
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    size = tokenizer.vocab_size
    assert run == dataclasses.replace(
        requested, model=dataclasses.replace(requested.model, vocab_size=size)
    )
    opened = load_torch_run(folder)
    weights, about = read_tensors(folder / "model.safetensors")
    assert about["step"] == 2
    assert opened.model.state_dict().keys() == weights.keys()
    for name, tensor in opened.model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    assert not opened.model.training
    assert opened.translator(beam=3).decode.beam == 3
    assert opened.translator().decode == run.decode


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    ends = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        run = read_recipe("phrasebook", [*TINY, f"seed={seed}"])
        make_trainer(run, tmp_path / name, torch.device("cpu")).run()
        ends.append(read_tensors(tmp_path / name / "model.safetensors")[0])
    table = "tokens.weight"
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not torch.equal(ends[0][table], ends[2][table])


def test_a_folder_of_release_0_1_names_its_start_as_init() -> None:
    table = dump(read_recipe("phrasebook"))
    table["start"] = table.pop("init") or "runs/before"
    assert parse(Run, table).init == "runs/before"


@pytest.mark.parametrize("name", ["config.json", "model.bin", "decoder.onnx"])
def test_a_folder_for_another_program_is_not_trained_into(name: str, tmp_path: Path) -> None:
    """It has a run.toml, so that commands work on it; training there would spoil both."""
    for file in (name, "run.toml", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match=f"{name}.*choose another folder"):
        check_folder(tmp_path)


PLAIN = Seq2SeqConfig(vocab_size=40, dim=16, layers=1, heads=2, max_length=16)
SIDES = ("encoder", "decoder")


def sided(core: Any = None, **cores: Any) -> str:
    """The digest of an encoder–decoder with these cores of its sides."""
    full: dict[str, Any] = {} if core is None else {"attention": core}
    own: dict[str, Any] = {name: StackOverrides(attention=chosen) for name, chosen in cores.items()}
    return model_digest(dataclasses.replace(PLAIN, **full, **own))


def test_how_attention_is_computed_is_no_part_of_what_weights_mean() -> None:
    exact = [kind() for kind in get_args(AttentionFunctionConfig) if kind.exact]
    assert len(exact) == 3
    plain = model_digest(PLAIN)
    assert plain == "f3e9aeb10963b03a"  # as weights of then have it
    assert {sided(core) for core in exact} == {plain}
    for name in SIDES:
        assert {sided(**{name: core}) for core in exact} == {plain}
        # Beside an inexact core it says something, and whichever it is the same.
        assert len({sided(Longformer(2), **{name: core}) for core in exact}) == 1
    assert sided(Tiled(), encoder=Dense(), decoder=Fused()) == plain


def test_what_a_query_sees_is_part_of_what_weights_mean() -> None:
    full = [PLAIN, *(dataclasses.replace(PLAIN, attention=Longformer(n)) for n in (2, 3))]
    actual = [model_digest(config) for config in full]
    assert actual[1] == "612d9b4dfd8ae30e"  # as weights of then have it
    assert sided(encoder=Longformer(2)) == "f79f63ebf168ef10"
    actual += [sided(**{name: Longformer(window)}) for name in SIDES for window in (2, 3)]
    actual += [sided(Longformer(2), **{name: Dense()}) for name in SIDES]
    actual += [sided(encoder=Performer(8)), sided(encoder=Performer(9))]
    actual += [sided(encoder=Longformer(2), decoder=Longformer(3))]
    assert len(set(actual)) == len(actual) == 12


@pytest.mark.parametrize(
    ("recipe", "wrong"),
    [
        ("phrasebook", "model.attention=linformer model.attention.rank=8"),
        ("phrasebook", "model.attention=linformer"),
        ("phrasebook", "model.attention=linformer model.attention.rank=8 model.max_length=30"),
        ("gpt-mini", "model.attention=linformer"),
    ],
)
def test_a_refused_core_is_told_with_settings_that_work(recipe: str, wrong: str) -> None:
    def built(settings: list[str]) -> Any:
        run = read_recipe(recipe, settings)
        return dataclasses.replace(run.model, vocab_size=40).build()

    with pytest.raises(UserError) as caught, torch.device("meta"):
        built(wrong.split())
    advised = [words.split() for words in re.findall(r"\((model\.\S*=[^)]*)\)", str(caught.value))]
    assert advised
    others = [word for word in wrong.split() if "attention" not in word]
    for advice in advised:
        if recipe == "phrasebook" or "encoder" not in advice[0]:
            with torch.device("meta"):
                assert built([*others, *advice])


@pytest.mark.parametrize(
    "core",
    ["local", "longformer", "performer", "memory-compressed"],
)
def test_packed_documents_are_refused_by_what_sees_by_places_in_a_row(core: str) -> None:
    settings = (
        f"objective.packing=documents model.position=sinusoidal model.attention={core}".split()
    )
    with pytest.raises(UserError, match=r"model\.attention.*objective\.packing=stream"):
        read_recipe("gpt-mini", settings)
    read_recipe("gpt-mini", settings[1:])


def test_packed_documents_are_kept_apart_by_exact_cores() -> None:
    for core in (core.kind for core in get_args(AttentionFunctionConfig) if core.exact):
        read_recipe("gpt-mini", ["objective.packing=documents", f"model.attention={core}"])
