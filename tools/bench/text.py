"""`zero tokenize` compared with the package `tokenizers`, on one core each.

Peer: out/python, which tools/install_packages makes. Both read the same
tokenizer.json, trained here with GPT-2's and Llama 3's patterns on the text
that is then tokenized: this tree's and Python's own sources.
"""

import glob
import os
import subprocess
import sys
import tempfile
import time

from common import ROOT, print_table, say

PYTHON = os.path.join(ROOT, "out/python/bin/python3")
ZOO = os.path.join(ROOT, "tests/e2e")
FASTER = 1.0  # what the project promises of zero / tokenizers

TRAIN = """
import sys
sys.path.append(sys.argv[1])
import tokenizer_zoo as zoo
from tokenizers import pre_tokenizers
text = open(sys.argv[2]).read()
zoo.corpus = lambda: text.splitlines(True)
for name, pre in (("GPT-2", zoo.byte_level(use_regex=True)),
                  ("Llama 3", pre_tokenizers.Sequence(
                      [zoo.split(zoo.LLAMA3), zoo.byte_level()]))):
    zoo.train(pre, vocab=16000).save(sys.argv[3] + name + ".json")
"""
# The package is fastest with lists of pieces.
PEER = """
import sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
text = open(sys.argv[2]).read()
pieces = [text[i:i + 65536] for i in range(0, len(text), 65536)]
start = time.perf_counter()
tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
print(time.perf_counter() - start)
"""


def write_text(path, size):
    files = (glob.glob(os.path.join(ROOT, "engine/*/*.cc")) +
             glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))
    with open(path, "w") as out:
        for name in sorted(files):
            with open(name, errors="replace") as f:
                out.write(f.read())
            if out.tell() > size:
                return


def zero_seconds(out, tokenizer, text, folder):
    """Without the start-up time."""
    empty = os.path.join(folder, "empty.txt")
    with open(empty, "w") as f:
        f.write("\n")

    def run(path):
        start = time.perf_counter()
        subprocess.run([os.path.join(ROOT, out, "zero"), "tokenize", path,
                        "--tokenizer", tokenizer, "--threads", "1", "--force",
                        "--out", os.path.join(folder, "out.bin")],
                       check=True, capture_output=True)
        return time.perf_counter() - start
    return min(run(text) for _ in range(3)) - min(run(empty) for _ in range(3))


def measure_text(args):
    """[{"tokenizer", "zero", "tokenizers", "ratio"}], in MB/s"""
    if not os.path.exists(os.path.join(ROOT, "out/python/installed")):
        say("no package `tokenizers` to compare with: tools/install_packages")
        return []
    rows = []
    alone = dict(os.environ, RAYON_NUM_THREADS="1",
                 TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text.txt")
        write_text(text, (2 if args.quick else 8) << 20)
        size = os.path.getsize(text) / 1e6
        subprocess.run([PYTHON, "-c", TRAIN, ZOO, text, folder + "/"],
                       check=True)
        for name in ("GPT-2", "Llama 3"):
            tokenizer = os.path.join(folder, name + ".json")
            peer = min(float(subprocess.run(
                [PYTHON, "-c", PEER, tokenizer, text], env=alone, check=True,
                capture_output=True, text=True).stdout) for _ in range(2))
            ours = zero_seconds(args.out, tokenizer, text, folder)
            rows.append({"tokenizer": name, "zero": size / ours,
                         "tokenizers": size / peer, "ratio": peer / ours})
    return rows


def print_text(rows):
    if not rows:
        return
    print_table(["text, one core", "zero MB/s", "tokenizers MB/s", "ratio"],
                [[row["tokenizer"]] + ["%.1f" % row[key] for key in
                                       ("zero", "tokenizers", "ratio")]
                 for row in rows])


def text_targets(rows):
    return [("%s text / tokenizers" % row["tokenizer"], row["ratio"], FASTER,
             True) for row in rows]
