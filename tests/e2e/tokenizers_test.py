"""`zero tokenize` with a tokenizer.json, token by token against the package
`tokenizers`, which tools/install_packages puts into out/python.

ZERO_TOKENIZER_STRINGS=1000000 compares more random strings than a check does.
"""

import glob
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path += glob.glob("out/python/lib/python3*/site-packages")
try:
    import tokenizers
    import tokenizer_zoo as zoo
except ImportError:
    tokenizers = None
    print("SKIPPED: no package `tokenizers`; tools/install_packages installs it",
          file=sys.stderr)

ZERO = os.path.abspath(os.path.join(os.environ.get("ZERO_OUT", "out"), "zero"))
STRINGS = int(os.environ.get("ZERO_TOKENIZER_STRINGS", "30000"))
SEPARATOR = "\x1e\x1f\x1e"


@unittest.skipIf(tokenizers is None, "no package `tokenizers` in out/python")
class TokenizersTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.zoo = zoo.zoo()
        cls.pools = zoo.character_pools()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def tokenize(self, tokenizer, text, *options):
        """The ids that zero writes for the bytes `text`."""
        tokenizer.save(self.path("tokenizer.json"))
        with open(self.path("text"), "wb") as f:
            f.write(text)
        result = subprocess.run(
            [ZERO, "tokenize", self.path("text"), "--tokenizer",
             self.path("tokenizer.json"), "--out", self.path("out.bin"),
             "--force", "--allow-lossy", *options],
            text=True, capture_output=True, timeout=600)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(self.path("out.bin"), "rb") as f:
            magic, _, count = struct.unpack("<3i", f.read(12))
            f.seek(1024)
            width = "H" if magic == 20240520 else "i"
            return list(struct.unpack("<%d%s" % (count, width), f.read()))

    def start_of(self, tokenizer):
        """The end of text, and the tokens that the template puts before a
        text."""
        end = tokenizer.token_to_id("<|end_of_text|>")
        end = tokenizer.token_to_id(zoo.END) if end is None else end
        return [end] + tokenizer.encode("", add_special_tokens=True).ids

    def encode(self, tokenizer, texts):
        tokenizer.encode_special_tokens = True
        return [e.ids for e in tokenizer.encode_batch_fast(
            texts, add_special_tokens=False)]

    def test_random_strings_have_the_tokens_of_the_package(self):
        rng = random.Random(5)
        for name, tokenizer in self.zoo.items():
            with self.subTest(tokenizer=name):
                count = -(-STRINGS // len(self.zoo))
                texts = [t for t in (zoo.random_string(rng, self.pools)
                                     for _ in range(count)) if t]
                got = self.tokenize(tokenizer, SEPARATOR.join(texts).encode(),
                                    "--separator", SEPARATOR)
                start, at = self.start_of(tokenizer), 0
                for text, ids in zip(texts, self.encode(tokenizer, texts)):
                    want = start + ids
                    self.assertEqual(got[at:at + len(want)], want, ascii(text))
                    at += len(want)
                self.assertEqual(len(got), at)

    def test_a_document_is_cut_where_no_token_is(self):
        rng = random.Random(6)
        text = "".join(rng.choice(("", "\n", "\n\n")) +
                       zoo.random_string(rng, self.pools)
                       for _ in range(40000))
        for name in ("gpt2", "llama3", "qwen2", "added", "prefixed",
                     "neox"):
            with self.subTest(tokenizer=name):
                tokenizer = self.zoo[name]
                want = self.start_of(tokenizer) + self.encode(
                    tokenizer, [text])[0]
                self.assertTrue(want == self.tokenize(
                    tokenizer, text.encode(), "--threads", "3"))

    def test_bytes_that_are_no_utf8_are_replaced(self):
        rng = random.Random(7)
        text = b"start " + b"".join(
            rng.choice((b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"ok ",
                        "\u20ac".encode(), b"\xf0\x9f\x98", b"\n",
                        bytes([rng.randrange(1, 256)])))
            for _ in range(20000))
        for name in ("gpt2", "llama3", "qwen2"):
            with self.subTest(tokenizer=name):
                tokenizer = self.zoo[name]
                want = self.start_of(tokenizer) + self.encode(
                    tokenizer, [text.decode("utf-8", "replace")])[0]
                self.assertTrue(want == self.tokenize(tokenizer, text))


if __name__ == "__main__":
    unittest.main()
