#!/usr/bin/env python3
"""Tokenizes text files with a Hugging Face tokenizer.json into token files for zero.

A token file is llm.c's: 256 int32 (magic, version, token count, zeros), then the tokens,
all little-endian. uint16 tokens have magic 20240520 and version 1; where the vocabulary
exceeds 65536, uint32 tokens have magic 20240801 and version 7.

    tools/hf_tokenize.py --tokenizer tokenizer.json --out data/train.bin \\
        --append-eot '<|endoftext|>' books/*.txt

Needs `pip install tokenizers`. Memory does not grow with the corpus. Output appears under
its name only when all of it is written.
"""

import argparse
import array
import difflib
import glob
import os
import pathlib
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator

HEADER_INTS = 256
MAX_TOKENS = 2**31 - 1  # the header's count is an int32
BATCH_BYTES = 2 << 20  # pieces are encoded in batches of about this size, on all cores
PIECE_BYTES = 64 << 10  # a longer document is cut where that changes no token
MAX_PIECE_BYTES = 32 << 20  # and must be cut by here: `tokenizers` needs 160 times the memory
CUT_WINDOW = 256  # bytes on either side of a cut that are looked at
RETRY_BYTES = 4096  # to the next try where a cut would change tokens
PROGRESS_SECONDS = 2.0


class UserError(Exception):
    """Something that the user can mend; printed without a traceback."""


class Writer:
    """Cuts a stream of tokens into files under temporary names; they get their own together,
    in commit(). How a token is stored is decided by the vocabulary, not by the tokens seen.

    A context manager: leaving it without commit() removes what was written.
    """

    def __init__(self, out: pathlib.Path, vocabulary: int, shard_tokens: int | None):
        self.out, self.shard_tokens = out, shard_tokens
        narrow = vocabulary <= 65536
        self.magic, self.version = (20240520, 1) if narrow else (20240801, 7)
        self.type_name, self.typecode = ("uint16", "H") if narrow else ("uint32", "I")
        self.file = None  # under a temporary name beside the last of `counts`
        self.counts: dict[pathlib.Path, int] = {}  # tokens of each file
        self.tokens = 0

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception) -> None:
        if self.file:
            self.file.close()
        for path in self.counts:
            self.temporary(path).unlink(missing_ok=True)

    @staticmethod
    def temporary(path: pathlib.Path) -> pathlib.Path:
        return path.with_name(f".{path.name}.tmp{os.getpid()}")

    def write(self, tokens: list[int]) -> None:
        """Appends tokens; a document may go on in the next shard."""
        self.tokens += len(tokens)
        limit, start = self.shard_tokens or MAX_TOKENS, 0
        while start < len(tokens):
            if not self.file or self.counts[self.path] == limit:
                self.next_file()
            part = array.array(self.typecode, tokens[start:start + limit - self.counts[self.path]])
            self.counts[self.path] += len(part)
            start += len(part)
            if sys.byteorder == "big":
                part.byteswap()
            self.file.write(part.tobytes())

    def next_file(self) -> None:
        self.finish()
        self.path = self.out
        if self.shard_tokens:
            self.path = self.out.with_name(
                f"{self.out.stem}_{len(self.counts):06d}{self.out.suffix}")
        elif self.counts:
            raise UserError(f"{self.out}: more than {MAX_TOKENS} tokens do not fit one file, "
                            "since its header counts in 32 bits; use --shard-tokens")
        self.counts[self.path] = 0
        self.file = open(self.temporary(self.path), "wb")
        self.file.write(bytes(4 * HEADER_INTS))

    def finish(self) -> None:
        """Puts the count into the header and the bytes onto the disk."""
        if self.file:
            self.file.seek(0)
            self.file.write(struct.pack("<3i", self.magic, self.version, self.counts[self.path]))
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()

    def commit(self) -> None:
        self.finish()
        for path in self.counts:
            os.replace(self.temporary(path), path)
        folder = os.open(self.out.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # so that the names survive a power cut
        finally:
            os.close(folder)


def earlier_outputs(out: pathlib.Path, sharded: bool) -> list[pathlib.Path]:
    """Files that this run replaces, or that a glob over its shards would also find."""
    if not sharded:
        return [out] if out.exists() else []
    pattern = re.compile(re.escape(out.stem) + r"_\d{6}" + re.escape(out.suffix))
    return sorted(p for p in out.parent.iterdir() if pattern.fullmatch(p.name))


def prepare_output(args: argparse.Namespace) -> list[pathlib.Path]:
    """Checks --out before any work is done; returns the files of an earlier run."""
    if args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder, want a file name such as "
                        f"{args.out / 'train.bin'}")
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: the folder {args.out.parent} does not exist")
    earlier = earlier_outputs(args.out, bool(args.shard_tokens))
    if earlier and not args.force:
        more = f" (and {len(earlier) - 1} more)" if len(earlier) > 1 else ""
        raise UserError(f"{earlier[0]} exists{more}; give another --out or --force")
    return earlier


def load_tokenizer(path: pathlib.Path):
    """The tokenizer, set to encode all of a text and nothing but the text."""
    try:
        import tokenizers
    except ImportError:
        raise UserError("the Python package `tokenizers` is missing; "
                        "run: python3 -m pip install tokenizers") from None
    if not path.is_file():
        raise UserError(f"--tokenizer {path}: no such file")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise UserError(f"--tokenizer {path} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()  # a tokenizer.json may carry a model's length limit
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text
    return tokenizer


def vocabulary_size(tokenizer) -> int:
    """Largest id + 1: ids may have holes, so counting entries is not enough."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_id(tokenizer, token: str) -> int:
    """The id of --append-eot's token, or an error that names the likely ones."""
    if (found := tokenizer.token_to_id(token)) is not None:
        return found
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    near = difflib.get_close_matches(token, special, 1) or special[:5]
    raise UserError(f"--append-eot {token}: not in the vocabulary; "
                    + (f"did you mean {', '.join(near)}?" if near
                       else "the tokenizer has no special tokens"))


def decode(raw: bytearray, path: pathlib.Path, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{path}: byte {offset + error.start}"
        raise UserError(f"{where} is not UTF-8 ({error.reason})") from None


def cut_test(tokenizer) -> Callable[[bytes, bytes], bool]:
    """A test whether encoding two neighbours apart gives the tokens of encoding them together.

    The cut must be after a single newline between two non-blank characters, and the tokens
    around it must agree: they do where the tokenizer splits text into words first (GPT-2,
    Llama 3, Qwen), not where it treats a text's start specially (Llama 2).
    """
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def can_cut(before: bytes, after: bytes) -> bool:
        tail = bytes(before[-CUT_WINDOW:]).decode("utf-8", "ignore")
        head = after[:CUT_WINDOW].decode("utf-8", "ignore")
        inside_text = tail[-2:-1].strip() and tail[-1:] == "\n" and head[:1].strip()
        return bool(inside_text) and ids(tail + head) == ids(tail) + ids(head)

    return can_cut


def file_pieces(path: pathlib.Path, separator: bytes | None,
                can_cut: Callable[[bytes, bytes], bool]) -> Iterator[tuple[str, bool]]:
    """(text, whether it ends its document) in order; empty documents are left out."""
    held, offset, try_at = bytearray(), 0, PIECE_BYTES  # held starts at byte offset of the file
    with open(path, "rb") as file:
        while line := file.readline(MAX_PIECE_BYTES):
            is_separator = separator is not None and line.rstrip(b"\r\n") == separator
            cut = not is_separator and len(held) >= try_at and can_cut(held, line)
            if len(held) >= try_at:
                try_at = len(held) + RETRY_BYTES
            if held and (is_separator or cut):
                yield decode(held, path, offset), is_separator
            if is_separator or cut:
                offset, held, try_at = offset + len(held), bytearray(), PIECE_BYTES
            if is_separator:
                offset += len(line)
            else:
                held += line
            if len(held) >= MAX_PIECE_BYTES:
                raise UserError(f"{path}: {len(held)} bytes from byte {offset} on cannot be cut "
                                "without changing tokens; separate documents with --split line=")
    if held:
        yield decode(held, path, offset), True


def batches(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Groups pieces so that a batch keeps all cores busy and memory small."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenize_all(args: argparse.Namespace) -> None:
    """Does what the command line says."""
    earlier = prepare_output(args)
    tokenizer = load_tokenizer(args.tokenizer)
    eot = [] if args.append_eot is None else [token_id(tokenizer, args.append_eot)]
    vocabulary = vocabulary_size(tokenizer)
    can_cut = cut_test(tokenizer)
    pieces = (p for path in args.inputs for p in file_pieces(path, args.split, can_cut))
    start = shown = time.monotonic()
    documents = num_bytes = 0
    with Writer(args.out, vocabulary, args.shard_tokens) as writer:
        for batch in batches(pieces):
            encodings = tokenizer.encode_batch_fast([text for text, _ in batch],
                                                    add_special_tokens=False)
            for encoding, (text, ends) in zip(encodings, batch):
                writer.write(encoding.ids + (eot if ends else []))
                documents += ends
                num_bytes += len(text.encode())
            if sys.stderr.isatty() and time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"{documents} documents, {num_bytes / 1e6:.1f} MB, {writer.tokens} tokens",
                      end="\r", file=sys.stderr, flush=True)
        if not writer.tokens:
            raise UserError(f"no text in {len(args.inputs)} files, nothing written")
        writer.commit()
    for stale in set(earlier) - set(writer.counts):
        stale.unlink()
    print(f"{documents} documents, {num_bytes} bytes, {writer.tokens} tokens "
          f"({num_bytes / writer.tokens:.2f} bytes per token) in "
          f"{time.monotonic() - start:.1f} s")
    for path, count in writer.counts.items():
        print(f"{path}: {count} {writer.type_name} tokens, vocabulary {vocabulary}")


def expand(pattern: str) -> list[str]:
    """The files of a glob that the shell did not expand, sorted; else the name itself."""
    if os.path.exists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    found = sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
    if not found:
        raise UserError(f"{pattern}: no file matches")
    return found


def input_files(patterns: list[str]) -> list[pathlib.Path]:
    """All inputs in order; each is checked before any work is done."""
    paths = [pathlib.Path(p) for pattern in patterns for p in expand(pattern)]
    for path in paths:
        if path.is_dir():
            raise UserError(f"{path} is a folder; name files, for example '{path}/**/*.txt'")
        if not os.access(path, os.R_OK):
            raise UserError(f"{path}: no such file, or not readable")
    return paths


def parse_split(text: str) -> bytes | None:
    """`file` is None: a file is a document; `line=TEXT` is the separator line's bytes."""
    if text == "file":
        return None
    if text.startswith("line="):
        return text.removeprefix("line=").encode()
    raise argparse.ArgumentTypeError(f"{text!r} is not `file` or `line=TEXT`")


def parse_shard_tokens(text: str) -> int:
    try:
        value = int(float(text)) if re.fullmatch(r"\d+e\d+", text) else int(text.replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 1 <= value <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{value} is not in [1, {MAX_TOKENS}]")
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="FILE", help="UTF-8 text files, or globs")
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True, metavar="JSON",
                        help="a Hugging Face tokenizer.json")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE",
                        help="token file to write, for example train.bin")
    parser.add_argument("--append-eot", metavar="TOKEN",
                        help="token to put after each document, for example '<|endoftext|>'")
    parser.add_argument("--split", type=parse_split, default="file", metavar="HOW",
                        help="what a document is: `file` (default), or `line=TEXT`: documents end "
                        "at lines that are exactly TEXT; `line=` is an empty line")
    parser.add_argument("--shard-tokens", type=parse_shard_tokens, metavar="N",
                        help="write NAME_000000.bin, NAME_000001.bin, ... of N tokens each "
                        "(the last is shorter), for example 1e8")
    parser.add_argument("--force", action="store_true", help="replace files of an earlier run")
    return parser.parse_args()


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left behind
    try:
        args.inputs = input_files(args.inputs)
        tokenize_all(args)
    except UserError as error:
        print(f"hf_tokenize.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # disk full, no permission
        print(f"hf_tokenize.py: {error.filename or args.out}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hf_tokenize.py: interrupted, nothing written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
