"""Tests tools/hf_tokenize.py as a user calls it, with small tokenizers made here.

    python3 -m unittest tests/tools/hf_tokenize_test.py

Needs the package `tokenizers`; without it every test that tokenizes is skipped, aloud.
"""

import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

try:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
except ImportError:
    tokenizers = None
    print("SKIPPED: tests of tools/hf_tokenize.py need the Python package `tokenizers` "
          "(python3 -m pip install tokenizers)", file=sys.stderr)

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "hf_tokenize.py"
EOT = "<|endoftext|>"
TEXT = "the cat sat on the mat, and the other cat sat on the cat.\n" * 20


def run(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, args)],
                          capture_output=True, text=True, timeout=120)


def read(path: pathlib.Path) -> tuple[tuple[int, int, int], list[int]]:
    """((magic, version, count), tokens), with the format's invariants checked."""
    raw = path.read_bytes()
    header = struct.unpack("<256i", raw[:1024])
    assert not any(header[3:]), "the rest of the header is zero"
    code, width = ("H", 2) if header[0] == 20240520 else ("I", 4)
    tokens = list(struct.unpack(f"<{(len(raw) - 1024) // width}{code}", raw[1024:]))
    assert header[2] == len(tokens), "the count is the number of tokens in the file"
    return header[:3], tokens


def byte_tokenizer(folder: pathlib.Path) -> pathlib.Path:
    """A byte-level BPE like GPT-2's, of 274 tokens, with traps: a length limit and a BOS."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=274, special_tokens=[EOT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOT} $A", special_tokens=[(EOT, tokenizer.token_to_id(EOT))])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@unittest.skipIf(tokenizers is None, "the Python package `tokenizers` is not installed")
class TokenizeTest(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)
        self.dir = pathlib.Path(self.scratch.name)
        self.json = byte_tokenizer(self.dir)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(self.json))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.eot = self.tokenizer.token_to_id(EOT)
        self.out = self.dir / "train.bin"

    def file(self, name: str, content: str | bytes) -> pathlib.Path:
        path = self.dir / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def tokenize(self, *args) -> str:
        """Runs the script with the usual options; returns what it prints."""
        result = run("--tokenizer", self.json, "--out", self.out, *args)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def refused(self, *args, tokenizer=None, out=None) -> str:
        """Runs the script, which must fail and leave no file; returns the message."""
        before = sorted(self.dir.iterdir())
        result = run("--tokenizer", tokenizer or self.json, "--out", out or self.out, *args)
        self.assertIn(result.returncode, (1, 2), result.stdout)
        self.assertNotIn("Traceback", result.stderr)
        self.assertEqual(sorted(self.dir.iterdir()), before, "nothing is left behind")
        return result.stderr

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def test_writes_header_and_tokens_that_decode_to_the_text(self):
        printed = self.tokenize(self.file("a.txt", TEXT))
        header, tokens = read(self.out)
        self.assertEqual(header, (20240520, 1, len(tokens)))
        self.assertEqual(tokens, self.ids(TEXT))
        self.assertEqual(self.tokenizer.decode(tokens), TEXT)
        self.assertIn(f"{len(tokens)} uint16 tokens, vocabulary 274", printed)

    def test_ignores_the_tokenizers_length_limit_padding_and_bos(self):
        self.tokenize(self.file("a.txt", TEXT), self.file("b.txt", "a"))
        self.assertEqual(read(self.out)[1], self.ids(TEXT) + self.ids("a"))

    def test_appends_end_of_text_after_every_file(self):
        paths = [self.file("a.txt", "the cat"), self.file("b.txt", "é 漢")]
        self.tokenize("--append-eot", EOT, *paths)
        self.assertEqual(read(self.out)[1],
                         [*self.ids("the cat"), self.eot, *self.ids("é 漢"), self.eot])

    def test_special_token_in_a_text_is_text(self):
        self.tokenize(self.file("a.txt", f"the {EOT} cat"))
        tokens = read(self.out)[1]
        self.assertNotIn(self.eot, tokens)
        self.assertEqual(self.tokenizer.decode(tokens), f"the {EOT} cat")

    def test_splits_documents_at_separator_lines_only(self):
        path = self.file("a.txt", "one\n---\ntwo --- two\nthree\r\n---\r\n\n---\n---\nlast")
        self.tokenize("--append-eot", EOT, "--split", "line=---", path)
        want = []
        for document in ("one\n", "two --- two\nthree\r\n", "\n", "last"):
            want += [*self.ids(document), self.eot]
        self.assertEqual(read(self.out)[1], want)

    def test_an_empty_separator_splits_at_empty_lines(self):
        self.tokenize("--append-eot", EOT, "--split", "line=", self.file("a.txt", "a\n\n\nb\n"))
        want = [*self.ids("a\n"), self.eot, *self.ids("b\n"), self.eot]
        self.assertEqual(read(self.out)[1], want)

    def test_a_long_document_is_cut_without_changing_tokens(self):
        text = (TEXT + "\n\n  the mat\n\tthe {cat};\n漢字\n" + "sat " * 50) * 800  # 1.1 MB
        self.tokenize("--append-eot", EOT, self.file("a.txt", text))
        self.assertEqual(read(self.out)[1], [*self.ids(text), self.eot])

    def test_a_long_document_that_cannot_be_cut_is_encoded_whole(self):
        self.tokenizer.normalizer = tokenizers.normalizers.Prepend("#")
        self.tokenizer.save(str(self.json))
        self.tokenize(self.file("a.txt", TEXT * 400))  # 464 kB
        self.assertEqual(read(self.out)[1], self.ids(TEXT * 400))

    def test_a_document_that_is_too_long_to_encode_whole_is_refused(self):
        path = self.file("a.txt", "the cat " * (5 << 20))  # one line of 40 MiB
        self.assertIn("cannot be cut without changing tokens", self.refused(path))

    def test_shards_have_n_tokens_each_and_join_to_the_whole(self):
        paths = [self.file(f"{i}.txt", TEXT[i:]) for i in range(3)]
        self.tokenize(*paths)
        whole = read(self.out)[1]
        self.tokenize("--shard-tokens", 100, *paths)
        shards = [read(p)[1] for p in sorted(self.dir.glob("train_*.bin"))]
        self.assertEqual(sum(shards, []), whole)
        self.assertEqual({len(s) for s in shards[:-1]}, {100})
        self.assertTrue(0 < len(shards[-1]) <= 100)

    def test_forced_shards_remove_those_of_a_longer_earlier_run(self):
        path, keep = self.file("a.txt", TEXT), self.file("train_notes.bin", "mine")
        self.tokenize("--shard-tokens", 50, path)
        self.assertGreater(len(list(self.dir.glob("train_0*.bin"))), 2)
        self.tokenize("--shard-tokens", "1e6", "--force", path)
        self.assertEqual([p.name for p in self.dir.glob("train_0*.bin")], ["train_000000.bin"])
        self.assertTrue(keep.exists())

    def test_uses_uint32_where_ids_do_not_fit_16_bits(self):
        vocabulary = {f"w{i}": i for i in range(65537)}
        words = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(self.json))
        self.tokenize(self.file("a.txt", "w1 w65536 w7"))
        self.assertEqual(read(self.out), ((20240801, 7, 3), [1, 65536, 7]))

    def test_uses_uint16_for_the_largest_vocabulary_that_fits(self):
        vocabulary = {f"w{i}": i for i in range(65536)}
        words = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(self.json))
        self.tokenize(self.file("a.txt", "w1 w65535 w7"))
        self.assertEqual(read(self.out), ((20240520, 1, 3), [1, 65535, 7]))

    def test_expands_a_quoted_glob_in_order(self):
        self.file("2.txt", "two"), self.file("1.txt", "one")
        self.tokenize(self.dir / "[0-9].txt")
        self.assertEqual(read(self.out)[1], self.ids("one") + self.ids("two"))

    def test_errors_name_the_cause(self):
        good = self.file("a.txt", "the cat")
        bad = self.file("bad.txt", b"the \xff cat")
        late = self.file("late.txt", b"one\n---\ntw\xc3")
        empty = self.file("empty.txt", "")
        self.assertIn("bad.txt: byte 4 is not UTF-8", self.refused(good, bad))
        self.assertIn("late.txt: byte 10 is not UTF-8", self.refused("--split", "line=---", late))
        self.assertIn("no text in 1 files", self.refused(empty))
        self.assertIn("nope.txt: no such file", self.refused(self.dir / "nope.txt"))
        self.assertIn("no file matches", self.refused(self.dir / "*.nope"))
        self.assertIn("is a folder", self.refused(self.dir))
        self.assertIn(f"did you mean {EOT}", self.refused("--append-eot", "<endoftext>", good))
        self.assertIn("no such file", self.refused(good, tokenizer=self.dir / "no.json"))
        self.assertIn("is not a tokenizer.json", self.refused(good, tokenizer=good))
        self.assertIn("does not exist", self.refused(good, out=self.dir / "no" / "train.bin"))
        self.assertIn("is a folder", self.refused(good, out=self.dir))
        self.assertIn("not in [1,", self.refused("--shard-tokens", 0, good))
        self.assertIn("is not `file` or `line=TEXT`", self.refused("--split", "words", good))

    def test_an_existing_file_is_replaced_only_when_forced(self):
        path = self.file("a.txt", "the cat")
        self.tokenize(path)
        self.assertIn("train.bin exists", self.refused(path))
        self.tokenize("--force", self.file("b.txt", "mat"))
        self.assertEqual(read(self.out)[1], self.ids("mat"))

    def test_a_failed_run_leaves_the_earlier_file_alone(self):
        self.tokenize(self.file("a.txt", "the cat"))
        before = self.out.read_bytes()
        self.refused("--force", self.file("bad.txt", b"\xff"))
        self.assertEqual(self.out.read_bytes(), before)


class ScriptTest(unittest.TestCase):
    def test_its_name_does_not_hide_the_standard_librarys_tokenize(self):
        code = (f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); "
                "import tokenize; print(tokenize.generate_tokens.__module__, tokenize.__file__)")
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertNotIn(str(ROOT), result.stdout)

    def test_help_says_what_it_is_for(self):
        result = run("--help")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("--append-eot", result.stdout)

    @unittest.skipIf(tokenizers is not None, "`tokenizers` is installed")
    def test_says_how_to_install_the_missing_package(self):
        with tempfile.TemporaryDirectory() as folder:
            result = run("--tokenizer", "t.json", "--out", folder + "/o.bin", __file__)
        self.assertEqual(result.returncode, 1)
        self.assertIn("pip install tokenizers", result.stderr)


if __name__ == "__main__":
    unittest.main()
