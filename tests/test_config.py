"""Settings: TOML and overrides round-trip, ranges hold, and errors name the right setting."""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.config import (
    Between,
    Count,
    Probability,
    Renamed,
    describe,
    dump,
    override_all,
    parse,
    to_toml,
)
from manyheads.errors import UserError
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.positions import NoPosition, Position, Rotary, RotaryPosition
from manyheads.recipes import read_recipe


@dataclass(frozen=True, kw_only=True)
class Wheel:
    size: int = 3
    kind: ClassVar[str] = "wheel"


@dataclass(frozen=True, kw_only=True)
class Sail:
    area: float = 1.5
    cloth: Literal["linen", "silk"] = "linen"
    kind: ClassVar[str] = "sail"


@dataclass(frozen=True, kw_only=True)
class Paint:
    colour: Literal["red", "blue"] = "red"
    coats: int = 1


@dataclass(frozen=True, kw_only=True)
class Cart:
    drive: Wheel | Sail = field(default_factory=Wheel)
    paint: Paint = field(default_factory=Paint)
    spare: Wheel | None = None
    name: str = "cart"
    load: float = 0.5
    seats: int = 2
    crew: int = 2
    open: bool = True
    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.crew > self.seats:
            raise UserError("more crew than seats")


@given(st.text(st.characters(codec="utf-8")), st.floats(allow_nan=False), st.integers())
def test_any_text_and_number_survives_toml(name: str, load: float, seats: int) -> None:
    cart = Cart(name=name, load=load, seats=seats, crew=min(seats, 0))
    assert parse(Cart, tomllib.loads(to_toml(dump(cart)))) == cart


def test_overrides_set_fields_by_type() -> None:
    cart = override_all(
        Cart(), ["drive=sail", "drive.area=3", "open=no", "stops=x,y", "seats=1e3", "spare=wheel"]
    )
    assert cart == Cart(
        drive=Sail(area=3.0), open=False, stops=("x", "y"), seats=1000, spare=Wheel()
    )


def test_overrides_of_a_part_keep_its_other_fields() -> None:
    assert override_all(Cart(paint=Paint(coats=4)), ["paint=blue"]).paint == Paint(
        colour="blue", coats=4
    )
    assert override_all(Cart(drive=Sail(area=9.0)), ["drive=sail"]).drive == Sail(area=9.0)
    opened = override_all(Cart(), ["spare.size=7"])
    assert opened.spare == Wheel(size=7)
    assert override_all(opened, ["spare=none"]).spare is None


def test_fields_that_check_each_other_may_come_in_any_order() -> None:
    assert override_all(Cart(), ["crew=5", "seats=6"]) == override_all(
        Cart(), ["seats=6", "crew=5"]
    )
    with pytest.raises(UserError, match="more crew than seats"):
        override_all(Cart(), ["crew=5"])


@dataclass(frozen=True, kw_only=True)
class Bare:
    kind: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class Boat:
    mast: Bare | Sail | None = None
    flag: Bare | Sail | None = field(default_factory=Sail)
    oars: Wheel | Sail | None = field(default_factory=Sail)
    depth: float | None = 2.0


def test_a_part_called_none_is_not_no_part() -> None:
    boat = override_all(Boat(), ["mast=none", "flag=none", "oars=none", "depth=none"])
    assert boat == Boat(mast=Bare(), flag=Bare(), oars=None, depth=None)
    assert override_all(boat, ["mast=null", "flag=off"]) == Boat(oars=None, depth=None, flag=None)
    with pytest.raises(UserError, match="known: none, null, sail"):
        override_all(Boat(), ["flag=zzz"])
    with pytest.raises(UserError, match="known: none, null, sail"):
        parse(Boat, {"flag": [1]})


@pytest.mark.parametrize("mast", [None, Bare(), Sail(area=2.0)])
@pytest.mark.parametrize("flag", [None, Bare(), Sail(area=2.0)])
@pytest.mark.parametrize("oars", [None, Wheel()])
def test_no_part_and_a_part_called_none_both_survive_toml(
    mast: Bare | Sail | None, flag: Bare | Sail | None, oars: Wheel | None
) -> None:
    for depth in (None, 3.0):
        boat = Boat(mast=mast, flag=flag, oars=oars, depth=depth)
        assert parse(Boat, tomllib.loads(to_toml(dump(boat)))) == boat


def test_one_side_of_a_model_can_have_no_position() -> None:
    model = override_all(Seq2SeqConfig(position=Rotary()), ["encoder.position=none"])
    assert (model.encoder.position, model.decoder.position) == (NoPosition(), None)
    assert parse(Seq2SeqConfig, tomllib.loads(to_toml(dump(model)))) == model
    built = dataclasses.replace(model, vocab_size=9, dim=8, heads=2, layers=1).build()
    assert type(built.encoder.position) is Position
    assert type(built.decoder.position) is RotaryPosition


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seets=3", "seats"),
        ("drive.aera=3", "size"),
        ("drive=sial", "sail"),
        ("paint=blu", "blue"),
        ("seats=two", "seats is a whole number"),
        ("seats=2.5", "seats is a whole number"),
        ("load=heavy", "a number"),
        ("open=perhaps", "true or false"),
        ("name.first=x", "single value"),
        ("seats", "name=value"),
        ("=3", "name=value"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_the_right_one(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        override_all(Cart(), [setting])
    assert "\n" not in str(caught.value)


def test_an_unknown_key_and_a_missing_field_are_named() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needy:
        must: int

    with pytest.raises(UserError, match=r"drive\.aria.*area"):
        parse(Cart, {"drive": {"kind": "sail", "aria": 1.0}})
    with pytest.raises(UserError, match="'must' is needed"):
        parse(Needy, {})


@dataclass(frozen=True, kw_only=True)
class Engine:
    power: Annotated[Count, "Horses"] = 3
    loss: Annotated[Probability | None, "Share of heat"] = None
    angle: Annotated[float, Between(0, 90, open_low=True), "Degrees"] = 45.0
    fuel: Annotated[Literal["coal", "wood"], Renamed(charred_wood="coal"), "What burns"] = "coal"
    wheels: Annotated[Wheel | Sail, "What moves"] = field(default_factory=Wheel)
    kind: ClassVar[str] = "engine"
    OLD_KINDS: ClassVar[tuple[str, ...]] = ("motor",)
    RENAMED: ClassVar[dict[str, str]] = {"strength": "power"}


@dataclass(frozen=True, kw_only=True)
class Train:
    engine: Annotated[Engine | Sail, "What pulls"] = field(default_factory=Engine)


@pytest.mark.parametrize(
    "setting",
    [
        *("power=0", "power=-1", "loss=1", "loss=-0.1", "loss=nan", "angle=0", "angle=90.5"),
        *("angle=inf", "angle=nan"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(setting: str) -> None:
    name, _, value = setting.partition("=")
    for use in (
        lambda: parse(Train, {"engine": {"kind": "engine", name: float(value)}}),
        lambda: override_all(Train(), [f"engine.{name}={value}"]),
    ):
        with pytest.raises(UserError, match=rf"engine\.{name}"):
            use()
    assert parse(Engine, {"power": 1, "loss": 0.0, "angle": 90.0}).loss == 0
    assert parse(Engine, {"loss": "none"}).loss is None


def test_old_names_kinds_and_values_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    new = Train(engine=Engine(power=7))
    table = {"kind": "motor", "strength": 7, "fuel": "charred-wood"}
    assert parse(Train, {"engine": table}) == new
    assert capsys.readouterr().err == ""
    assert override_all(Train(), ["engine=motor", "engine.strength=7"]) == new
    notes = ["'engine=motor' is now 'engine=engine'", "'engine.strength' is now 'engine.power'"]
    assert capsys.readouterr().err.splitlines() == notes
    assert dump(new)["engine"]["kind"] == "engine"


def test_describe_gives_name_type_default_and_meaning_also_of_other_kinds() -> None:
    rows = {(row.name, row.text): row for row in describe(Train())}
    assert rows["engine", "engine"].type == "engine|sail"
    assert rows["engine.power", "3"][1:] == ("integer (at least 1)", 3, "Horses")
    assert rows["engine.loss", "none"].type == "number (from 0 to below 1)|none"
    assert rows["engine.fuel", "coal"].type == "coal|wood"
    assert rows["engine.wheels.size", "3"].type == "integer"
    assert rows["engine.wheels.area", "1.5"].meaning.startswith("engine.wheels=sail")
    assert ("engine.area", "1.5") not in rows  # the kind at the top level is the recipe's
    names = {row.name: row for row in describe(Boat())}
    assert names["mast"].default == "null"  # `none` is a part of that name
    assert names["flag"].type == "none|sail|null"


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("train.lr=1", "train.learning_rate"),
        ("learning_rate=1", "train.learning_rate"),
        ("train.early_stopping=3", "train.patience"),
        ("model.num_layers=3", "model.layers"),
        ("train.learning_rat=1", "train.learning_rate"),
    ],
)
def test_a_wrong_name_leads_to_the_setting_that_is_meant(setting: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"did you mean '{meant}'"):
        read_recipe("phrasebook", [setting])
