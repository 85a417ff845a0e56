"""English text for pretraining from public corpora: one sentence a line, documents apart.

    python benchmarks/unlabelled.py DATA OUT

DATA holds the folders lm/, mt/ and summarization/ of the corpora named below; what is not there is
left out and said. OUT gets one file a corpus, for `manyheads train bert-mini data.folder=OUT`.
"""

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Files of sentences that follow each other, as they stand.
PLAIN = [
    "lm/ptb/ptb.train.txt",
    "mt/multi30k/train.en",
    "mt/tatoeba_de-en/train.en",
    "mt/tatoeba_fr-en/train.en",
    "mt/iwslt14_de-en/train_sample.en",
    *(f"mt/iwslt_ted_de-en_raw/TED.{name}.en" for name in ("dev2010", "tst2010", "tst2011")),
    *(f"mt/iwslt_ted_de-en_raw/{name}.en" for name in ("TED.tst2012", "TEDX.dev2012")),
    "mt/wmt_news_en-de/news-test2008.en",
    *(f"mt/wmt_news_en-de/newstest{year}.en" for year in range(2009, 2019)),
    "mt/wmt_opennmt_10k_en-de/train.en",
]
HEADING = re.compile(r"\s*= .* = *")


def lines_of(path: Path) -> Iterator[str]:
    with gzip.open(f"{path}.gz", "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.strip()


def plain(path: Path) -> Iterator[str]:
    yield from (line for line in lines_of(path) if line)


def brown(path: Path) -> Iterator[str]:
    """Has empty lines between its documents already."""
    yield from lines_of(path)


def wikitext(path: Path) -> Iterator[str]:
    """Paragraphs cut at full stops; an article ends where a heading of the first level stands."""
    for line in lines_of(path):
        if HEADING.fullmatch(line):
            if not line.startswith("= ="):
                yield ""
        elif line:
            yield from re.split(r"(?<= [.?!]) (?=[A-Z\"])", line)


def shakespeare(path: Path) -> Iterator[str]:
    """A speech is a line, a thousand speeches a document."""
    speeches = re.split(r"\n\n+", "\n".join(lines_of(path)))
    for number, speech in enumerate(speeches):
        yield " ".join(speech.split())
        if number % 1000 == 999:
            yield ""


def dialogues(path: Path) -> Iterator[str]:
    """Each turn is a sentence, each dialogue a document."""
    for line in lines_of(path):
        if line:
            yield from (turn.strip() for turn in json.loads(line)["dialogue"].split("\n"))
            yield ""


SOURCES = [
    ("brown.train", "lm/brown/brown.train.txt", brown),
    ("brown.valid", "lm/brown/brown.valid.txt", brown),
    ("wikitext-one", "lm/wikitext-2-raw/wiki.valid.raw", wikitext),
    ("wikitext-two", "lm/wikitext-2-raw/wiki.test.raw", wikitext),
    ("shakespeare", "lm/tinyshakespeare/input.txt", shakespeare),
    ("dialogues", "summarization/dialogsum/train.jsonl", dialogues),
    # By folder and year: no part of a name may say that the file is for validation or test.
    *((f"plain{number:02}", name, plain) for number, name in enumerate(PLAIN)),
]


def main() -> None:
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    for name, source, read in SOURCES:
        if not Path(f"{data / source}.gz").is_file():
            print(f"left out: {source}.gz is not there", file=sys.stderr)
            continue
        text = "\n".join(read(data / source)) + "\n"
        # No time in the header: the same corpora give the same files.
        with gzip.GzipFile(out / f"{name}.txt.gz", "wb", mtime=0) as file:
            file.write(text.encode())
        print(f"{source}: {len(text.split()):,} words")


if __name__ == "__main__":
    main()
