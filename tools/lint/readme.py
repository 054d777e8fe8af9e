"""Commands in READMEs exist: programs, files, zero's subcommands and
options."""

import os
import re
import shlex
import shutil
import subprocess

README = "README.md"
# Build outputs that a README may name before they exist.
MADE = ("out/",)


def _commands(tree, readme):
    """(line, words) of each command in the fenced `sh` blocks."""
    inside, joined, start = False, "", 0
    for number, line in tree.lines(readme):
        if line.strip().startswith("```"):
            inside = line.strip() in ("```sh", "```bash", "```shell")
            continue
        if not inside:
            continue
        joined, start = joined + line, start or number
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        text = re.sub(r"(^|\s)#.*", "", joined).strip()
        text = re.sub(r"^\$ ", "", text)
        for command in re.split(r"&&|\|\||[;|]|^for .*? do ", text):
            words = shlex.split(command)
            while words and (re.match(r"\w+=", words[0]) or
                             words[0] in ("do", "sudo", "time", "exec")):
                words.pop(0)
            if words and words[0] != "done":
                yield start, words
        joined, start = "", 0


def _zero(tree, words):
    """Asks the binary: a subcommand without --help, or an option its help does
    not name, does not exist."""
    binary = tree.path(tree.zero)
    if not os.access(binary, os.X_OK) or os.path.isdir(binary):
        yield "%s is not built" % tree.zero
        return
    sub = [w for w in words[1:2] if not w.startswith("-")]
    shown = subprocess.run([binary] + sub + ["--help"], capture_output=True,
                           text=True, cwd=tree.root)
    if shown.returncode:
        yield "`zero %s --help` fails: no such subcommand" % " ".join(sub)
        return
    for word in words[1:]:
        option = word.split("=")[0]
        if option.startswith("-") and option != "--help" and not re.search(
                r"(?<![\w-])%s(?![\w-])" % re.escape(option), shown.stdout):
            yield "zero %s has no option %s" % (" ".join(sub), option)


def _target(tree, word):
    edge = re.compile(r"^build (?:\S+ )*%s(?: \S+)*:" % re.escape(word), re.M)
    return any(edge.search(tree.text(n)) for n in tree.files
               if n.endswith(".ninja"))


def check(tree):
    if README not in tree.files:
        yield "README.md: missing"
        return
    for readme in tree.files:
        if os.path.basename(readme) == README:
            yield from _check_one(tree, readme)


def _check_one(tree, readme):
    for line, words in _commands(tree, readme):
        program = words[0]
        where = "%s:%d: " % (readme, line)
        if program == "zero" or program.endswith("/zero"):
            for complaint in _zero(tree, words):
                yield where + complaint
        elif program == "ninja":
            for word in words[1:]:
                if re.match(r"[\w-]+$", word) and not word.startswith(
                        "-") and not _target(tree, word):
                    yield where + "ninja has no target %s" % word
        elif "/" in program:
            if not program.startswith(MADE) and not os.access(
                    tree.path(program), os.X_OK):
                yield where + "%s is not an executable file" % program
        elif not shutil.which(program) and program not in (
                "apt-get", "git", "sudo", "pip", "mpirun", "srun", "sbatch",
                "torchrun"):
            yield where + "no program %s" % program
        for word in words[1:]:
            path = re.sub(r"^--?[\w-]+=", "", word).rstrip("/")
            ours = path.split("/")[0] in ("configs", "tools", "tests", "models",
                                          "engine", "kernels", "optim")
            if ours and "/" in path and not re.search(r"[*$<{]", path) and \
                    not os.path.exists(tree.path(path)):
                yield where + "%s does not exist" % path
