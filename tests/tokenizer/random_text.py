"""Random texts that are hard on tokenizers."""

import random

WORDS = ("the The word words left lef t right ri ght both don't I'LL we'Ve it'ſ naïve café Straße İstanbul ǅ né éé "
         "<|im_start|> <|im_end|> <|im <|endoftext|> <|strip|> [one] <mask> <s> </s> <unk> [INST] <0x0A> <0x41> ▁ ▁▁ "
         "<tool_call> <start_of_turn> <eot_id> <table> <|assistant|> <|user|> <|end|> <|tag|> <｜User｜> <think> e. x. https://a.b/c?d=e%20f def f(x): return x**2").split(" ")
SPACES = [" ", "  ", "   ", "\n", "\r\n", "\n\n\n", "\t", "\v", "\f", "\u0085", "\u00a0", "\u1680", "\u180e", "\u2003",
          "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u200b", "\u200c", "\u200d", "\ufeff", " \n ", "\n  \n"]
CONTRACTIONS = ["'s", "'S", "'t", "'RE", "'ve", "'m", "'lL", "'d", "'x", "''", "'", "’s", "'\u017f", "'\u1e9e"]
EDGES = [0x0, 0x1, 0x7F, 0x80, 0xFF, 0x100, 0x300, 0x345, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFDD0, 0xFDFA, 0xFFFD, 0xFFFE,
         0xFFFF, 0x10000, 0x1F1E6, 0x1F600, 0x1FFFF, 0x20000, 0x2F800, 0x10FFFF, 0x1100, 0x1161, 0x11A8, 0xAC00, 0xD7A3]
RANGES = [(0x20, 0x7E), (0x0, 0x1F), (0xA0, 0x17F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF), (0x900, 0xDFF),
          (0xE00, 0xFFF), (0x1100, 0x11FF), (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x2BFF), (0x3040, 0x30FF),
          (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0xFB00, 0xFDFF), (0xFE00, 0xFFFD), (0x10000, 0x107FF),
          (0x1D400, 0x1D7FF), (0x1F000, 0x1FAFF), (0x20000, 0x2A6DF), (0xE0000, 0xE01EF), (0x660, 0x669), (0x2150, 0x218B)]


def character(rng, allowed=lambda c: True):
    while True:
        c = chr(rng.choice(EDGES) if rng.random() < 0.1 else rng.randint(*rng.choice(RANGES)))
        if not "\ud800" <= c <= "\udfff" and allowed(c):
            return c


def chunk(rng, allowed):
    kind = rng.randrange(12)
    if kind <= 2:
        return rng.choice(WORDS) + rng.choice(["", " ", " ", " "])
    if kind == 3:
        return "".join(rng.choices(SPACES, k=rng.randint(1, 4)))
    if kind == 4:
        return rng.choice(["I", "he", "é", "5", " ", ""]) + rng.choice(CONTRACTIONS)
    if kind == 5:
        return "".join(rng.choices("0123456789", k=rng.randint(1, 9)))
    if kind == 6:
        return rng.choice("aeo") + "".join(chr(rng.randint(0x300, 0x36F)) for _ in range(rng.randint(1, 5)))
    if kind == 7:
        return "".join(rng.choices("!?.,;:-_()[]{}<>|/\\\"'`~@#$%^&*+=", k=rng.randint(1, 6)))
    if kind == 8:
        return character(rng, allowed) * rng.randint(1, 30)
    if kind == 9:
        return rng.choice(["👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽", "❤️", "1️⃣", "🏴󠁧󠁢󠁳󠁣󠁴󠁿"])
    return "".join(character(rng, allowed) for _ in range(rng.randint(1, 12)))


def texts(seed, count, allowed=lambda c: True):
    """`allowed`: which random characters may be in them."""
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(c for c in "".join(chunk(rng, allowed) for _ in range(rng.randint(1, 24))) if allowed(c))
