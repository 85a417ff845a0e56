"""Our product with one row, interpreted where Triton is installed."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from torch import nn
from torch.nn import functional as F
from manyheads.kernels import gemv as single
from manyheads.nn.feedforward import ACTIVATIONS
from manyheads.kernels.gemv import KINDS, Single, Summed
from manyheads.kernels.dispatch import passes
torch.manual_seed(1)
near = dict(rtol=1e-4, atol=1e-4)
single.AT_ONCE = 128  # a few rows of small matrices at once
sizes = ((1, 8), (13, 40), (9, single.WIDEST + 500))  # the last by more than one piece a row
for (outputs, inputs), biased in itertools.product(sizes, (True, False)):
    weight = torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    part = Single(weight, bias)
    for shape in ((inputs,), (1, 1, inputs), (3, inputs)):
        x = torch.randn(shape)
        torch.testing.assert_close(part(x), F.linear(x, weight, bias), **near)

    # With a norm before it (inside or not), an activation, and a sum.
    for single.INSIDE, norm, kind in itertools.product(
        (0, 2**22), (nn.LayerNorm(inputs), nn.RMSNorm(inputs, eps=0.1)), KINDS
    ):
        for one in norm.parameters():
            nn.init.normal_(one)
        x, s = torch.randn(1, 1, inputs) + 0.5, torch.randn(1, 1, outputs)
        part.norm, part.activation = norm, kind
        inner = F.linear(norm(x), weight, bias)
        with torch.no_grad():
            torch.testing.assert_close(part(x), ACTIVATIONS[kind](inner), **near)
            added = Summed(part, None)(s, lambda _: part(x))
            torch.testing.assert_close(added, ACTIVATIONS[kind](inner) + s, **near)
            many = x.expand(1, 2, -1)
            torch.testing.assert_close(part(many)[:, 0], part(x)[:, 0], **near)
            assert part.added is None

# A mean far from zero leaves the deviation what it is, inside and outside.
x, norm, weight = 1000.0 + torch.randn(40), nn.LayerNorm(40, eps=1e-5), torch.randn(9, 40)
wanted = norm.double()(x.double()) @ weight.double().mT
part = Single(weight, None)
part.norm = norm.float()
with torch.no_grad():
    for single.INSIDE in (0, 2**22):
        torch.testing.assert_close(part(x).double(), wanted, rtol=0, atol=1e-4)

weight, inputs = torch.randn(9, 60), 60
exact = Single(weight.double(), None)
x = torch.randn(inputs, dtype=torch.float64)
torch.testing.assert_close(exact(x), weight.double() @ x, rtol=1e-13, atol=1e-13)
assert passes(lambda: single.selftest(torch.device("cpu")), "single")
"""

WHOLE = """
import torch
from manyheads.decode.kv_cache import KVCache
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.feedforward import Gated, Plain
from manyheads.kernels import gemv as single
from manyheads.nn.residual import Norm, Residual
from manyheads.kernels.gemv import Summed, for_one_row

single.AT_ONCE = 128
asked, norms_asked, one_product, one_norm = [], [], single.gemv, single.norm_row
inside = []
def spied(x, weight, bias, kind, added, *norm):
    asked.append((kind >= 0, added is not None))
    inside.extend([1] * bool(norm))
    return one_product(x, weight, bias, kind, added, *norm)
single.gemv = spied
single.norm_row = lambda *given: (norms_asked.append(1), one_norm(*given))[1]

sizes = dict(vocab_size=30, dim=24, heads=2, layers=2, hidden=40, max_length=16)
norms = (Norm(), Norm(form="rms", eps=0.01), Norm(placement="post"))
forwards = (Plain(activation="gelu"), Plain(activation="tanh"), Gated())
for config in (GptConfig, Seq2SeqConfig):
    for norm in norms:
        for forward in forwards:
            torch.manual_seed(1)
            model = config(**sizes, norm=norm, feedforward=forward).build().eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            other, found = for_one_row(model), []
            single.INSIDE = 2**22 if norm is norms[0] else 0
            text = torch.randint(3, 30, (1, 5))
            pre, plain = norm.placement == "pre", forward is forwards[0]
            for one in (model, other):
                cache, asked[:], norms_asked[:], inside[:] = KVCache(), [], [], []
                with torch.no_grad():
                    if config is GptConfig:
                        one.hidden(text[:, :3], cache=cache)
                        steps = [one.hidden(text[:, at : at + 1], cache=cache) for at in (3, 4)]
                    else:
                        memory = one.encode(text, torch.ones(1, 5, dtype=torch.bool))
                        steps = [one.decode(text[:, :1], memory, cache=cache)]
                    found.append([one.logits(step) for step in steps])
            for a, b in zip(*found):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            parts, steps = (2, 2) if config is GptConfig else (3, 1)
            every = pre and steps * (2 * parts + 1)  # each once
            assert len(norms_asked) + len(inside) == every
            assert bool(inside) == (norm is norms[0])
            gated = forward is forwards[2]  # two products of one norm, which is outside of them
            assert bool(norms_asked) == (pre and (gated or norm is not norms[0]))
            assert any(added for _, added in asked) == pre
            assert any(active for active, _ in asked) == plain
            kinds = {type(block.attention_residual) for block in other.decoder.blocks}
            assert kinds == {Summed if pre else Residual}
            assert all(type(block.attention_residual) is Residual for block in model.decoder.blocks)
"""


@needs_triton
def test_the_kernel_computes_the_formula() -> None:
    interpret(PROGRAM)


@needs_triton
def test_a_model_for_one_row_writes_what_the_model_writes() -> None:
    interpret(WHOLE)
