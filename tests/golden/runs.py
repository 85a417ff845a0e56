"""The golden runs: recipe, settings and the commands whose output is recorded.

Names of recipes, settings and options are those of release 0.1, which later releases accept as
aliases. Where a later release drops an alias, change the name here; the record stays as it is.
"""

from dataclasses import dataclass
from functools import cache

from tests.golden.data import WORDS, sample_lines

STEPS = 30

SIZES = (
    *("model.dim=32", "model.layers=2", "model.heads=2", "model.hidden=64", "model.max_length=64"),
    *(f"train.steps={STEPS}", "train.warmup_steps=8", "train.log_every=1"),
    *("train.validate_every=15", "train.save_every=15"),
)
PHRASEBOOK = (
    *("data.train_pairs=300", "data.valid_pairs=16", "data.test_pairs=6"),
    *("tokens.vocab_size=600", "train.batch_tokens=400", "decode.validate_sentences=2"),
    *("train.too_long=skip", "train.learning_rate=8e-3", "decode.beam=2"),
)
TEXTS = ("data.folder={texts}", "tokens.vocab_size=560", "train.batch_tokens=400")
TABLES = (
    *("data.folder={tables}", "tokens.vocab_size=560", "train.batch_rows=8", "train.epochs=none"),
    *("train.warmup_share=none", "train.learning_rate=1e-3"),
)
IMAGES = (
    *("data.folder={images}", "train.epochs=none", "train.warmup_share=none"),
    *("train.batch_rows=16", "model.image_size=8", "model.dim=32", "model.layers=2"),
    *("model.heads=2", "model.hidden=64"),
)
# A recurrent or convolutional model has no heads, and begins with sizes of its own.
BASELINE = ("model.dim=32", "model.max_length=64", "model.dropout=0.1")

SENTENCES = (
    "The dog sees the tree.",
    "A small cat sleeps in the house.",
    "We do not know the old man.",
    "the",
)
PROMPTS = tuple(" ".join(WORDS[first : first + 4]) for first in (0, 17))


@dataclass(frozen=True)
class Command:
    """`manyheads NAME RUN ARGUMENTS < STDIN`; `output` is how its standard output is recorded.

    In an argument `{run}` is the run folder and `{texts}` the folder of a data set.
    """

    name: str
    arguments: tuple[str, ...] = ()
    stdin: str = ""
    output: str = "text"  # text, json, json-lines or array

    @property
    def key(self) -> str:
        return " ".join((self.name, *self.arguments))


@dataclass(frozen=True)
class GoldenRun:
    """One training of 30 steps and the commands that use its result.

    `init` names the run whose weights this one begins with.
    """

    name: str
    recipe: str
    settings: tuple[str, ...]
    commands: tuple[Command, ...] = ()
    init: str | None = None


def lines(*texts: str) -> str:
    return "".join(f"{text}\n" for text in texts)


EVALUATE = Command("evaluate", ("--json",), output="json")
EVALUATE_VALID = Command("evaluate", ("--split", "valid", "--json"), output="json")
GREEDY = Command("translate", ("--beam", "1"), lines(*SENTENCES))
BEAM = Command("translate", ("--beam", "4", "--n-best", "4"), lines(*SENTENCES))
SAMPLE = Command("translate", ("--sample", "--top-k", "20", "--seed", "3"), lines(*SENTENCES))
ENSEMBLE = Command("translate", ("--with", "{run}", "--beam", "2"), lines(*SENTENCES))
# After 30 steps a model ends a sentence at once: let it generate some tokens before.
LONGER = "decode.shortest=6"
TRANSLATE = (
    Command("translate", ("--beam", "1", LONGER), lines(*SENTENCES)),
    Command("translate", ("--beam", "4", "--n-best", "4", LONGER), lines(*SENTENCES)),
    EVALUATE,
)
TOKENS = Command("tokens", ("The unbelievable dogs", "--json"), output="json")
INFO = Command("info", ("--json",), output="json")

GENERATE = (
    Command("generate", ("--temperature", "0", "--max-new-tokens", "24"), lines(*PROMPTS)),
    Command("generate", ("--seed", "5", "--max-new-tokens", "24"), lines(*PROMPTS)),
    EVALUATE,
)
GENERATE_MORE = (
    Command("generate", ("--beam", "3", "--max-new-tokens", "16"), lines(*PROMPTS)),
    Command(
        "generate",
        ("--top-p", "0.8", "--top-k", "30", "--min-p", "0.01", "--max-new-tokens", "16"),
        lines(*PROMPTS),
    ),
    Command("evaluate", ("--stride", "12", "--json"), output="json"),
    INFO,
)
PLAIN = lines(*sample_lines())
EMBED = Command("embed", (), PLAIN, output="array")
EMBED_MORE = (
    Command("embed", ("--pool", "cls"), PLAIN, output="array"),
    Command("embed", ("--pool", "tokens"), PLAIN, output="array"),
)
MASKED = lines(*(line.replace(line.split()[1], "[MASK]", 1) for line in sample_lines()))
FILL = (
    Command("fill", (), MASKED),
    Command("fill", ("--top", "3", "--json"), MASKED, output="json-lines"),
)
CLASSIFY = (
    Command("classify", ("--scores",), PLAIN),
    Command("classify", ("--json",), PLAIN, output="json-lines"),
)


def phrasebook(name: str, *settings: str, commands: tuple[Command, ...] = TRANSLATE) -> GoldenRun:
    return GoldenRun(name, "phrasebook", (*SIZES, *PHRASEBOOK, *settings), commands)


def baseline(kind: str, *settings: str) -> GoldenRun:
    sizes = [one for one in SIZES if one.startswith("train.")]
    settings = (*sizes, *PHRASEBOOK, f"model={kind}", *BASELINE, *settings)
    return GoldenRun(f"translation-{kind}", "phrasebook", settings, TRANSLATE)


# The recipe `language` as it was in release 0.1, whose losses are recorded.
LANGUAGE_01 = (
    *("by_data=", "model.dropout=0.1", "model.attention_dropout=0", "train.ema_decay=0"),
    *("train.min_lr_ratio=0.1", "train.weight_decay=0.1", "train.patience=none"),
)


def text(name: str, recipe: str, *settings: str, commands: tuple[Command, ...]) -> GoldenRun:
    return GoldenRun(name, recipe, (*SIZES, *TEXTS, *settings), commands)


RUNS = (
    phrasebook(
        "translation-pre",
        *("model.norm=pre", "model.dropout=0.1"),
        commands=(GREEDY, BEAM, *TRANSLATE, SAMPLE, TOKENS, INFO, EVALUATE_VALID),
    ),
    phrasebook(
        "translation-post",
        *("model.norm=post", "train.schedule=transformer", "train.learning_rate=none"),
        *("train.label_smoothing=0.1", "model.dropout=0.1", "data.pair=en-fr"),
    ),
    phrasebook("translation-rotary", "model.position=rotary", "model.feedforward=gated"),
    phrasebook("translation-t5-bilinear", "model.position=t5", "model.score=bilinear"),
    phrasebook(
        "translation-shaw-additive",
        "model.position=shaw",
        "model.score=additive",
        "model.core=dense",
    ),
    phrasebook("translation-experts", "model.feedforward=experts", "model.feedforward.experts=4"),
    phrasebook(
        "translation-rdrop",
        *("train.agreement=2", "train.label_smoothing=0.1", "model.dropout=0.2"),
        commands=(EVALUATE,),
    ),
    phrasebook(
        "translation-recompute",
        *("train.recompute=true", "model.dropout=0.1", "train.accumulate=2"),
        commands=(),
    ),
    phrasebook(
        "translation-averaged",
        *("train.average=3", "train.save_every=5", "train.keep=last", "train.weight_decay=0.1"),
        commands=(BEAM,),
    ),
    GoldenRun(
        "translation-files-bpe-dropout",
        "translation",
        (
            *(*SIZES, "data.folder={pairs}", "data.source=src", "data.target=trg"),
            *("tokens.vocab_size=500", "train.batch_tokens=400", "decode.validate_sentences=2"),
            *("train.segmentations=4", "train.merge_dropout=0.2", "by_data="),
        ),
        (
            Command("translate", ("--beam", "1", LONGER), PLAIN),
            Command("translate", ("--beam", "4", "--n-best", "2", LONGER), PLAIN),
            EVALUATE,
        ),
    ),
    baseline("rnn"),
    baseline("gnmt"),
    baseline("convs2s"),
    baseline("bytenet"),
    GoldenRun(
        "translation-joined",
        "phrasebook",
        (
            *(*(one for one in SIZES if "model." not in one), *PHRASEBOOK, "model=joined"),
            *(*BASELINE, "model.layers=2", "model.heads=2", "model.hidden=64"),
            "model.embed.scale=sqrt-dim",
        ),
        TRANSLATE,
    ),
    text("language", "language", *LANGUAGE_01, commands=(*GENERATE, *GENERATE_MORE)),
    text(
        "language-documents",
        *("gpt-mini", "data.lines=sentences", "objective.packing=documents"),
        commands=GENERATE,
    ),
    text(
        "language-characters",
        *("shakespeare-char", "tokens=characters", "model.position=alibi"),
        commands=GENERATE,
    ),
    text(
        "language-performer",
        *("language", *LANGUAGE_01, "model.core=performer"),
        commands=GENERATE,
    ),
    text(
        "language-local",
        *("language", *LANGUAGE_01, "model.core=local", "model.core.size=8", "model.kv_heads=1"),
        commands=GENERATE,
    ),
    text("bert", "bert-mini", commands=(*FILL, EMBED, *EMBED_MORE, EVALUATE)),
    text(
        "roberta",
        *("bert-mini", "objective.pairs=none", "model.pooler=none", "model.next_sentence=none"),
        *("data.lines=text", "objective.masking=static", "model.norm=post"),
        *("model.position=learned",),
        commands=(*FILL, EMBED, EVALUATE),
    ),
    text("bert-longformer", "bert-mini", "model.core=longformer", commands=(FILL[0], EVALUATE)),
    text(
        "bert-linformer",
        *("bert-mini", "model.core=linformer", "model.core.rank=16", "model.position=learned"),
        commands=(FILL[0], EVALUATE),
    ),
    text("electra", "electra-mini", commands=(EMBED,)),
    text("t5", "t5-mini", commands=(EVALUATE,)),
    text("bart", "t5-mini", "objective=denoising", commands=(EVALUATE,)),
    GoldenRun(
        "elmo",
        "elmo-mini",
        (
            *(one for one in SIZES if "heads" not in one and "hidden" not in one),
            *TEXTS,
        ),
        (EMBED, EVALUATE),
    ),
    GoldenRun("classify", "classify", (*SIZES, *TABLES), (*CLASSIFY, EMBED, EVALUATE)),
    GoldenRun(
        "classify-pair-number",
        "classify",
        (*SIZES, *TABLES, "data.label=score", "data.pair=pair", "data.answer=number"),
        (Command("classify", (), lines("\t".join(sample_lines(2)))), EVALUATE),
    ),
    GoldenRun(
        "classify-from-bert",
        "classify",
        (
            *("data.folder={tables}", "train.batch_rows=8", "train.epochs=none"),
            *("train.warmup_share=none", "train.learning_rate=1e-3"),
            *(one for one in SIZES if one.startswith("train.")),
        ),
        (CLASSIFY[0], EVALUATE),
        init="bert",
    ),
    GoldenRun(
        "images",
        "images",
        (*(one for one in SIZES if "max_length" not in one), *IMAGES, "by_data="),
        (
            EVALUATE,
            Command("classify", ("{pngs}", "--scores")),
            Command("classify", ("{pngs}", "--json"), output="json-lines"),
        ),
    ),
    GoldenRun(
        "images-augmented",
        "images",
        (
            *(*(one for one in SIZES if "max_length" not in one), *IMAGES),
            *("data.augment.crop_padding=1", "data.augment.flip=0.5", "data.augment.operations=1"),
            *(
                "data.mixing.mixup=0.4",
                "data.mixing.cutmix=1",
                "model.pooler.over=mean",
                "by_data=",
            ),
        ),
        (EVALUATE,),
    ),
    GoldenRun(
        "chorales",
        "jsb-chorales",
        (*SIZES, "data.folder={chorales}", "train.batch_tokens=256", "data.transpose=2"),
        (
            EVALUATE,
            Command("generate", ("--out", "{run}.mid", "--seed", "3", "--max-new-tokens", "64")),
        ),
    ),
    GoldenRun(
        "midi",
        "midi",
        (*SIZES, "data.folder={midi}", "train.batch_tokens=256", "data.tempi=0.95,1.05"),
        (EVALUATE_VALID,),
    ),
    GoldenRun(
        "summaries",
        "summaries",
        (
            *(*SIZES, "data.folder={summaries}", "tokens.vocab_size=500"),
            *("train.batch_tokens=400", "decode.validate_sentences=2"),
        ),
        (Command("translate", ("--beam", "4", LONGER), lines("⏎".join(sample_lines(3)))), EVALUATE),
    ),
    GoldenRun(
        "summaries-memory-compressed",
        "summaries",
        (
            *(*(one for one in SIZES if "model." not in one), "data.folder={summaries}"),
            *("model=joined", *BASELINE, "model.layers=2", "model.heads=2", "model.hidden=64"),
            *("model.core=memory-compressed", "model.core.size=16", "tokens.vocab_size=500"),
            *("train.batch_tokens=400", "decode.validate_sentences=2", "decode.beam=2"),
        ),
        (EVALUATE,),
    ),
)

# Runs of the device twin: what CUDA graphs and bfloat16 train.
DEVICE_RUNS = ("translation-pre", "translation-post", "language", "bert", "t5", "images")


@cache
def by_name() -> dict[str, GoldenRun]:
    return {run.name: run for run in RUNS}


# Commands without a run whose `--json` output has times: only names and types are recorded.
SCHEMA_COMMANDS = {
    "compare": (
        *("compare", "phrasebook", "model.position=rotary,alibi", *SIZES, *PHRASEBOOK),
        *("train.steps=2", "train.validate_every=2", "train.save_every=2", "--out", "{out}"),
        *("data.train_pairs=100", "data.valid_pairs=4", "decode.beam=1", "model.layers=1"),
        *("--threads", "1", "--device", "cpu", "--json"),
    ),
    "cost": (
        *("cost", "--cores", "fused", "--lengths", "64,128", "--rounds", "1"),
        *("--threads", "1", "--device", "cpu", "--json"),
    ),
    "claims": ("claims", "--json"),
}
