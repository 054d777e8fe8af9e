"""Tokenizers like those of known models, trained on little text, and strings
that are hard to cut. Needs the package `tokenizers`.

  tokenizer_zoo.py FOLDER        writes FOLDER/NAME/tokenizer.json of each
"""

import os
import random
import sys
import unicodedata

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models,
                        normalizers, pre_tokenizers, processors, trainers)

# Sources: the tokenizer.json of meta-llama/Meta-Llama-3-8B, Qwen/Qwen2-7B and
# deepseek-ai/DeepSeek-V3 on huggingface.co, and o200k_base of
# github.com/openai/tiktoken.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
         r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
         r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

END = "<|endoftext|>"
WORDS = ("the of and to in is that it was for on are as with his they at be "
         "this have from or one had by word but not what all were we when "
         "your can said there use an each which she do how their if will up "
         "other about out many then them these so some her would make like "
         "him into time has look two more write go see number no way could "
         "people my than first water been call who oil its now find long down "
         "day did get come made may part I'm don't we'll they've you're it's "
         "caf\u00e9 na\u00efve stra\u00dfe \u0444\u0443\u043d\u043a\u0446\u0438"
         "\u044f \u043c\u043e\u0434\u0435\u043b\u044c \u6a21\u578b "
         "\u8bed\u8a00 \u8a13\u7df4 \u3053\u3093\u306b\u3061\u306f "
         "\ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940 "
         "\u0639\u0631\u0628\u064a return int main(void) { for (i = 0; i < n; "
         "++i) std::vector<int32_t> def __init__(self): 2024 1234567 3.14159 "
         "0xFF && || != -> => // /* */ \t\t \u20ac5 \U0001f600 \U0001f44d"
         "\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467").split(" ")


def corpus(seed=1, lines=4000):
    rng = random.Random(seed)
    return ["%s%s" % (" " * rng.choice((0, 0, 0, 2, 4)),
                      " ".join(rng.choices(WORDS, k=rng.randint(1, 12))))
            + rng.choice((".", "!", "", ";", ",", ")")) +
            rng.choice(("\n", "\n\n", "\r\n")) for _ in range(lines)]


def train(pre_tokenizer, normalizer=None, vocab=1500, special=(END,)):
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def byte_level(add_prefix_space=False, use_regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space,
                                    use_regex=use_regex)


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(
        Regex(pattern), behavior=behavior, invert=invert)


def gpt2():
    tokenizer = train(byte_level(use_regex=True))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def llama3():
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
               "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = train(
        pre_tokenizers.Sequence([split(LLAMA3), byte_level()]),
        special=special)
    tokenizer.model.ignore_merges = True
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single=special[0] + " $A", pair=special[0] + " $A $B",
            special_tokens=[(special[0],
                             tokenizer.token_to_id(special[0]))])])
    return tokenizer


def qwen2():
    tokenizer = train(
        pre_tokenizers.Sequence([split(QWEN2), byte_level()]),
        normalizers.NFC(), special=(END, "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False)
                          for t in ("<tool_call>", "</tool_call>", "<think>")])
    return tokenizer


def deepseek():
    return train(pre_tokenizers.Sequence([
        split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        split(DEEPSEEK), byte_level()]))


def o200k():
    return train(pre_tokenizers.Sequence([split(O200K), byte_level()]))


def prefixed():
    """Like RoBERTa and BLOOM: a leading space, separate digits, NFKC."""
    tokenizer = train(
        pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            byte_level(add_prefix_space=True, use_regex=True)]),
        normalizers.Sequence([normalizers.NFKC()]))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def added():
    """Every property of an added token, except white space: the package finds
    it again in the part taken by an rstrip token."""
    tokenizer = train(byte_level(use_regex=True), normalizers.NFC())
    tokenizer.add_tokens([
        AddedToken("the", single_word=True, normalized=False),
        AddedToken("vie\u0323\u0302t", normalized=True),
        AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True),
        AddedToken("<lr>", lstrip=True, rstrip=True, normalized=False),
        AddedToken("wait", single_word=True, rstrip=True)])
    return tokenizer


def neox():
    """GPT-NeoX's runs of white space."""
    tokenizer = train(byte_level(use_regex=True), normalizers.NFC())
    tokenizer.add_tokens([
        AddedToken(" " * 4, normalized=False), AddedToken("  ", normalized=True),
        AddedToken("\n\n", normalized=False)])
    return tokenizer


def behaviors(behavior, invert):
    return train(pre_tokenizers.Sequence([
        split(r"\s|[,;.]", behavior, invert),
        pre_tokenizers.Split("e", "merged_with_next"), byte_level()]))


def zoo():
    """{name: tokenizer}"""
    made = {make.__name__: make() for make in (
        gpt2, llama3, qwen2, deepseek, o200k, prefixed, added, neox)}
    for behavior in ("removed", "isolated", "merged_with_previous",
                     "merged_with_next", "contiguous"):
        for invert in (False, True):
            name = behavior + ("_inverted" if invert else "")
            made[name] = behaviors(behavior, invert)
    return made


def is_known(c):
    """Whether the package, whose normal forms are of an older Unicode than its
    patterns, knows the character."""
    return all(
        form.normalize_str(s) == unicodedata.normalize(name, s)
        for form, name in ((normalizers.NFC(), "NFC"),
                           (normalizers.NFKC(), "NFKC"))
        for s in (c, "a%c\u0323" % c, "a\u0334%c\u0301" % c))


def character_pools():
    """Characters by behaviour, in a Unicode that PCRE2 10.42 knows as well: it
    has 14, like Python 3.11."""
    data = unicodedata
    if data.unidata_version > "14.0.0":
        data = unicodedata.ucd_3_2_0
    by_category = {}
    for c in map(chr, range(1, 0x110000)):
        category = data.category(c)
        if category not in ("Cn", "Cs", "Co") and is_known(c):
            by_category.setdefault(category, []).append(c)
    return {
        "all": list(by_category.values()),
        "marks": by_category["Mn"] + by_category["Mc"] + by_category["Me"],
        "spaces": list(" \t\n\r\f\v\x85\xa0\u1680\u180e\u2003\u2028\u2029\u3000"),
        "digits": by_category["Nd"][:40] + by_category["No"][:20],
    }


def random_string(rng, pools):
    """A few characters, words, runs of white space, marks, code, emoji."""
    parts = []
    for _ in range(rng.randint(1, 8)):
        kind = rng.randrange(12)
        if kind < 4:
            parts.append(rng.choice(("", " ")) + rng.choice(WORDS))
        elif kind == 4:
            parts.append("".join(rng.choices(pools["spaces"],
                                             k=rng.randint(1, 5))))
        elif kind == 5:
            parts.append("".join(rng.choice(rng.choice(pools["all"]))
                                 for _ in range(rng.randint(1, 4))))
        elif kind == 6:
            parts.append(rng.choice("aeiouAOU\u0915\u1100") + "".join(
                rng.choices(pools["marks"][:300], k=rng.randint(1, 3))))
        elif kind == 7:
            parts.append("".join(rng.choices(pools["digits"],
                                             k=rng.randint(1, 9))))
        elif kind == 8:
            parts.append("".join(rng.choices("!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~\n ",
                                             k=rng.randint(1, 6))))
        elif kind == 9:
            parts.append(rng.choice((
                "'s", "'S", "'LL", "'\u017f", "n't", END, "<|im_start|>",
                "<think>", "<mask>", " <mask> ", "<l>", "<r>", "<lr>", "wait",
                "the", "cafe\u0301", "vie\u0302\u0323t", "<|eot_id|>")))
        elif kind == 10:
            parts.append(rng.choice(WORDS)[:2] * rng.randint(1, 12))
        else:
            parts.append(rng.choice(("\n", "\n\n", "\r\n", "  \n  ", "    ")))
    return "".join(parts)


def main():
    folder, = sys.argv[1:]
    for name, tokenizer in zoo().items():
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        tokenizer.save(os.path.join(folder, name, "tokenizer.json"))


if __name__ == "__main__":
    main()
