"""The phrasebook: the built-in parallel corpus, English to German and English to French.

A small synchronous grammar draws what a sentence says (`grammar`), and each language puts it into
words (`english`, `german`, `french`), so every pair comes with its gold word alignment. It has
what makes the two directions worth a Transformer: German verbs that wait for the end of their
clause, case and gender; French elision, agreement and negation around the verb; numbers, relative
clauses and questions in both.
"""

from manyheads.phrasebook.corpus import PAIRS, SPLITS, sentences
from manyheads.phrasebook.layout import Pair

__all__ = ["PAIRS", "SPLITS", "Pair", "sentences"]
