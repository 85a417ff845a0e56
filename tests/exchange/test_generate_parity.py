"""Greedy and beam search give what `generate` of `transformers` gives, token for token.

Random tiny models of four families with peaked distributions, in float64 (both programs search in
float32), each with several prompts and with a search whose settings are random as well.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn

from manyheads.decode.beam import Decode, Hypothesis, SpecialTokens
from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample, filtered
from manyheads.decode.translate import Translator
from manyheads.exchange.huggingface import from_huggingface
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.tokenizer.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints")

MODELS, ALL = 15, 50
PROMPTS = 3
BEAM = 4
# What we call the rules of stopping, and what they do.
STOPPING = {"early": True, "heuristic": False, "exact": "never"}
PAD, START, FIRST, WORD = 0, 1, 2, 3


def gpt2(chance: random.Random, shared: dict[str, Any]) -> nn.Module:
    sizes = {"n_embd": chance.choice([16, 24, 32]), "n_layer": chance.choice([1, 2]), "n_head": 2}
    config = transformers.GPT2Config(**sizes, n_positions=64, bos_token_id=START, **shared)
    return transformers.GPT2LMHeadModel(config)


def sides(chance: random.Random) -> dict[str, Any]:
    """The sizes of BART and Marian."""
    dim = chance.choice([16, 24, 32])
    return {
        "d_model": dim,
        "encoder_layers": chance.choice([1, 2]),
        "decoder_layers": chance.choice([1, 2]),
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * dim,
        "decoder_ffn_dim": 2 * dim,
        "max_position_embeddings": 64,
        "decoder_start_token_id": START,
        "forced_eos_token_id": None,
    }


def bart(chance: random.Random, shared: dict[str, Any]) -> nn.Module:
    config = transformers.BartConfig(**sides(chance), **shared)
    return transformers.BartForConditionalGeneration(config)


def marian(chance: random.Random, shared: dict[str, Any]) -> nn.Module:
    return transformers.MarianMTModel(transformers.MarianConfig(**sides(chance), **shared))


def t5(chance: random.Random, shared: dict[str, Any]) -> nn.Module:
    dim, layers = chance.choice([16, 24, 32]), chance.choice([1, 2])
    sizes = {"d_model": dim, "d_kv": 8, "d_ff": 2 * dim, "num_layers": layers, "num_heads": 2}
    form = chance.choice(["relu", "gated-gelu"])
    config = transformers.T5Config(
        **sizes, feed_forward_proj=form, decoder_start_token_id=PAD, **shared
    )
    return transformers.T5ForConditionalGeneration(config)


FAMILIES = [gpt2, bart, t5, marian]
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


def sharpen(model: nn.Module) -> None:
    """Weights so large that the model is sure of itself, and attends more to what it wrote than
    to the source, lest it write one word for ever."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif any(table in name for table in ("shared", "embed_tokens", "wte", "lm_head")):
                parameter.normal_(std=0.7)
            elif parameter.requires_grad:  # sinusoids stay what they are
                crosses = "encoder_attn" in name or "EncDecAttention" in name
                parameter.normal_(std=(1 if crosses else 3) / parameter.shape[-1] ** 0.5)


def likely_end(theirs: nn.Module, prompt: list[int], chance: random.Random) -> int:
    """One of the three words that the model writes most, so that texts end at various lengths."""
    texts = torch.randint(WORD, theirs.config.vocab_size, (1, 24))
    read = {"input_ids": texts}
    if theirs.config.is_encoder_decoder:
        read = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": texts}
    with torch.no_grad():
        share = theirs(**read).logits.softmax(-1).mean((0, 1))[WORD:]
    return WORD + int(share.topk(3).indices[chance.randrange(3)])


def words(vocabulary: int) -> Tokenizer:
    """A tokenizer whose words are numbers, written out."""
    names = {"<pad>": PAD, **{str(number): number for number in range(1, vocabulary)}}
    inner = tokenizers.Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner)


@dataclass(frozen=True)
class Case:
    """A model of theirs with prompts, and how to write."""

    theirs: Any
    prompts: list[list[int]]
    decode: Decode
    limit: int

    def generate(self) -> list[list[Hypothesis]]:
        """What `transformers` writes. Prompts without an encoder go by length, never padded."""
        if self.theirs.config.is_encoder_decoder:
            marks = SpecialTokens(words(self.theirs.config.vocab_size), self.decode)
            read = [torch.tensor(marks.source(prompt)) for prompt in self.prompts]
            return self._generate(nn.utils.rnn.pad_sequence(read, True, -1), begun=1)
        found: dict[int, list[Hypothesis]] = {}
        for length in {len(prompt) for prompt in self.prompts}:
            rows = [row for row, prompt in enumerate(self.prompts) if len(prompt) == length]
            read = torch.tensor([self.prompts[row] for row in rows])
            found |= dict(zip(rows, self._generate(read, begun=length), strict=True))
        return [found[row] for row in range(len(self.prompts))]

    def _generate(self, read: Tensor, begun: int) -> list[list[Hypothesis]]:
        decode, end = self.decode, self.decode.end
        settings = transformers.GenerationConfig(
            num_beams=decode.beam,
            num_return_sequences=decode.beam,
            do_sample=False,
            length_penalty=decode.length_penalty,
            early_stopping=STOPPING[decode.stopping],
            max_new_tokens=self.limit,
            min_new_tokens=decode.min_length,
            forced_bos_token_id=decode.forced_bos,
            forced_eos_token_id=end if decode.at_limit == "force-eos-free" else None,
            bad_words_ids=[[token] for token in decode.suppress_tokens or ()] or None,
            pad_token_id=PAD,
            eos_token_id=end,
            decoder_start_token_id=decode.start,
            return_dict_in_generate=True,
            output_scores=True,
        )
        real = read >= 0
        out = self.theirs.generate(
            read.clamp(min=PAD), attention_mask=real.long(), generation_config=settings
        )
        written = [line[: [*line, end].index(end)] for line in out.sequences[:, begun:].tolist()]
        scores = [0.0] * len(written) if decode.beam == 1 else out.sequences_scores.tolist()
        hypotheses = [Hypothesis(t, 0.0, s) for t, s in zip(written, scores, strict=True)]
        beams = range(0, len(hypotheses), decode.beam)
        lines = [hypotheses[at : at + decode.beam] for at in beams]
        # A place that no hypothesis has taken is there all the same, with a score of −10⁹.
        return [[h for h in line if h.score > -1e8] for line in lines]

    def search(self, ours: nn.Module) -> list[list[Hypothesis]]:
        """What we write."""
        tokenizer = words(self.theirs.config.vocab_size)
        if isinstance(ours, Gpt):
            return Generator(ours, tokenizer, self.decode).search(self.prompts, self.limit)
        assert isinstance(ours, Seq2Seq)
        texts = [" ".join(map(str, prompt)) for prompt in self.prompts]
        return Translator(ours, tokenizer, self.decode).search(texts)


def draw_case(family: Any, number: int) -> Case:
    """The model, prompts and settings of this number; to be searched with a beam."""
    chance = random.Random(f"{family.__name__} {number}")
    torch.manual_seed(chance.randrange(2**31))
    shared = {"vocab_size": chance.randint(20, 60), "tie_word_embeddings": chance.random() < 0.5}
    theirs = family(chance, {**shared, "pad_token_id": PAD, "eos_token_id": None}).double().eval()
    theirs.generation_config = transformers.GenerationConfig()
    sharpen(theirs)
    lengths = [chance.randint(1, 9), chance.randint(1, 9)]
    prompts = [
        [chance.randrange(WORD, theirs.config.vocab_size) for _ in range(chance.choice(lengths))]
        for _ in range(PROMPTS)
    ]
    limit = chance.choice([1, 2, 5, 8, 11, 13, 15, 15])
    settings: dict[str, Any] = {
        "penalty": "length",
        "length_penalty": chance.choice([0.0, 0.5, 1.0, 2.0, -1.0]),
        "stopping": chance.choice([*STOPPING]),
        "at_limit": chance.choice(["force-eos-free", "truncate"]),
        "min_length": chance.choice([0, 0, 3]),
        "end": likely_end(theirs, prompts[0], chance),
        "suppress_tokens": chance.choice([(), (PAD, START)]),
        "max_length_ratio": 0.0,
        "max_length_extra": limit,
    }
    if family is not gpt2:
        settings["start"] = theirs.config.decoder_start_token_id
    if family is bart:
        settings["forced_bos"] = chance.choice([FIRST, FIRST, None])
        settings["source_start"] = chance.choice([START, None])
    return Case(theirs, prompts, Decode(beam=BEAM, **settings), limit)


def slow(case: Any) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


def best(lines: list[list[Hypothesis]]) -> list[list[int]]:
    return [line[0].tokens for line in lines]


@pytest.mark.parametrize("numbers", [range(MODELS), slow(range(MODELS, ALL))], ids=str)
@families
def test_search_equals_transformers(family: Any, numbers: range) -> None:
    """Each prompt of each model, greedily and with a beam: the same tokens and the same scores.

    Further down in the n-best lists scores may be equal but for rounding, and change places.
    """
    lengths = set()
    for number in numbers:
        case = draw_case(family, number)
        ours = from_huggingface(case.theirs)
        greedy = replace(case, decode=replace(case.decode, beam=1))
        assert best(greedy.search(ours)) == best(greedy.generate()), f"{number}: {case.decode}"
        actual, expected = case.search(ours), case.generate()
        assert best(actual) == best(expected), f"{number}: {case.decode}"
        for line, theirs in zip(actual, expected, strict=True):
            scores = [h.score for h in theirs]
            assert [h.score for h in line] == pytest.approx(scores, abs=1e-4, rel=1e-4)
        lengths |= {len(tokens) for tokens in best(actual)}
    assert len(lengths) > 9  # neither do all run to their limits nor all end at once


def test_sampling_filters_are_the_same() -> None:
    """The same tokens are left by temperature, top k, top p and min p, with the same chances."""
    for number in range(40):
        chance = random.Random(number)
        sample = Sample(
            temperature=chance.choice([0.5, 1.0, 2.0]),
            top_k=chance.choice([0, 1, 7, 99]),
            top_p=chance.choice([1.0, 0.9, 0.4]),
            min_p=chance.choice([0.0, 0.05, 0.5]),
        )
        steps = [transformers.TemperatureLogitsWarper(sample.temperature)]
        steps += [transformers.TopKLogitsWarper(sample.top_k)] if sample.top_k else []
        steps += [
            transformers.TopPLogitsWarper(sample.top_p),
            transformers.MinPLogitsWarper(sample.min_p),
        ]
        logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(number)) * 2
        theirs = logits
        for step in steps:
            theirs = step(torch.zeros(5, 1, dtype=torch.long), theirs)
        torch.testing.assert_close(filtered(logits, sample).softmax(-1), theirs.softmax(-1))
